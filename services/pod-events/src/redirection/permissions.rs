//! Permissions for settings that let traffic bypass ztunnel, granted only by the node (`pods_may`)
//! and the namespace (`inpod.io/allow`).

use std::str::FromStr;

use inpod_types::keys;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Permission {
    Exclude,
    KeepExisting,
}

impl FromStr for Permission {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            keys::ALLOW_EXCLUDE => Ok(Self::Exclude),
            keys::ALLOW_KEEP_EXISTING => Ok(Self::KeepExisting),
            _ => Err(format!(
                "setting pods_may: \"{text}\" is not {} or {}",
                keys::ALLOW_EXCLUDE,
                keys::ALLOW_KEEP_EXISTING
            )),
        }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Permissions {
    exclude: bool,
    keep_existing: bool,
}

impl Permissions {
    /// Unknown names permit nothing.
    pub fn parse(text: &str) -> Self {
        let names = text.split(',').map(str::trim);
        let known: Vec<_> = names.filter_map(|name| name.parse().ok()).collect();
        Self::from(&*known)
    }

    pub fn include(self, permission: Permission) -> bool {
        match permission {
            Permission::Exclude => self.exclude,
            Permission::KeepExisting => self.keep_existing,
        }
    }

    #[must_use]
    pub fn or(self, other: Self) -> Self {
        Self {
            exclude: self.exclude || other.exclude,
            keep_existing: self.keep_existing || other.keep_existing,
        }
    }

    pub fn names(self) -> String {
        let names = [
            (self.exclude, keys::ALLOW_EXCLUDE),
            (self.keep_existing, keys::ALLOW_KEEP_EXISTING),
        ];
        let names = names.iter().filter(|(is, _)| *is).map(|(_, name)| *name);
        names.collect::<Vec<_>>().join(",")
    }
}

impl From<&[Permission]> for Permissions {
    fn from(granted: &[Permission]) -> Self {
        Self {
            exclude: granted.contains(&Permission::Exclude),
            keep_existing: granted.contains(&Permission::KeepExisting),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_names_permit_and_unknown_names_permit_nothing() {
        for (text, words) in [
            ("", ""),
            ("exclude", "exclude"),
            (" keep-existing ,exclude", "exclude,keep-existing"),
            ("Exclude,keep_existing,all,*", ""),
            ("exclude;keep-existing", ""),
        ] {
            assert_eq!(Permissions::parse(text).names(), words, "{text:?}");
        }
    }

    #[test]
    fn a_setting_with_an_unknown_name_is_refused_and_the_known_ones_are_listed() {
        let error = "everything".parse::<Permission>().unwrap_err();
        let named = ["pods_may", "everything", "exclude", "keep-existing"];
        assert!(named.iter().all(|word| error.contains(word)), "{error}");
    }
}
