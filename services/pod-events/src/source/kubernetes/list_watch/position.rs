//! The version that a reflector knows, which decides how the reflector lists.

use kube::api::{ListParams, VersionMatch};

use super::End;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(in super::super) enum Position {
    /// Nothing was listed yet.
    Unknown,
    /// Everything is known up to this version, and a watch continues there.
    At(String),
    /// Everything is known up to this version, but no watch continues there.
    Expired(String),
    /// The server is behind the known version, or refuses to compare versions.
    Ahead,
}

impl Position {
    /// Decides which version a list must have.
    ///
    /// - Before the first list, any version of the watch cache is enough: nothing is known that the cache may lag behind,
    ///   except for single objects, which [`Store`](super::super::store::Store) keeps while they are newer than the list.
    /// - Later, the list must be at least as new as the known version. A server that lags behind waits, and then refuses
    ///   the version.
    /// - After the refusal, the current version is listed. If the version is lower than the known version, the server's
    ///   store was restored from a backup; otherwise only the server's cache was late.
    pub(super) fn list_params(&self) -> ListParams {
        match self {
            Self::Unknown => ListParams::default().at("0"),
            Self::At(version) | Self::Expired(version) => ListParams::default()
                .at(version)
                .matching(VersionMatch::NotOlderThan),
            Self::Ahead => ListParams::default(),
        }
    }

    /// Returns the position after a list or a watch has ended. A list from a known version that is refused as expired is
    /// not repeated with the same version.
    pub(super) fn after(&self, end: &End) -> Self {
        match (self, end) {
            (_, End::Ended | End::Disconnected(_) | End::TooLarge(_)) => self.clone(),
            (_, End::Behind(_)) => Self::Ahead,
            (Self::At(version), End::Expired(_)) => Self::Expired(version.clone()),
            (Self::Unknown | Self::Expired(_) | Self::Ahead, End::Expired(_)) => Self::Ahead,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(version: &str) -> Position {
        Position::At(version.to_owned())
    }

    fn expired(version: &str) -> Position {
        Position::Expired(version.to_owned())
    }

    #[test]
    fn a_list_requires_the_version_that_the_position_knows() {
        let not_older = Some(VersionMatch::NotOlderThan);
        for (position, version, version_match) in [
            (Position::Unknown, Some("0"), None),
            (at("7"), Some("7"), not_older.clone()),
            (expired("7"), Some("7"), not_older),
            (Position::Ahead, None, None),
        ] {
            let params = position.list_params();
            assert_eq!(params.resource_version.as_deref(), version, "{position:?}");
            assert_eq!(params.version_match, version_match, "{position:?}");
            assert_eq!(params.limit, None, "{position:?}");
        }
    }

    #[test]
    fn the_end_of_a_list_or_watch_decides_the_next_position() {
        let why = String::new;
        for (before, end, after) in [
            (
                Position::Unknown,
                End::Disconnected(why()),
                Position::Unknown,
            ),
            (Position::Unknown, End::Expired(why()), Position::Ahead),
            (at("7"), End::Ended, at("7")),
            (at("7"), End::Disconnected(why()), at("7")),
            (at("7"), End::TooLarge(why()), at("7")),
            (at("7"), End::Expired(why()), expired("7")),
            (at("7"), End::Behind(why()), Position::Ahead),
            (expired("7"), End::Disconnected(why()), expired("7")),
            (expired("7"), End::Behind(why()), Position::Ahead),
            (expired("7"), End::Expired(why()), Position::Ahead),
            (Position::Ahead, End::Disconnected(why()), Position::Ahead),
            (Position::Ahead, End::Behind(why()), Position::Ahead),
        ] {
            assert_eq!(before.after(&end), after, "{before:?} after {end:?}");
        }
    }
}
