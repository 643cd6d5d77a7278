//! Selects the backend for pods' rules: the configured one, or the best one that works here. Detection runs once per
//! boot and is cached, so that a restart selects the same.

mod cache;
mod evidence;

use std::{fmt, path::Path, str::FromStr};

use crate::{
    apply::Writer,
    backend::{Backend, Variant, variant_of},
    iptables::Programs,
    sysctl::Sysctls,
};
use cache::Detection;
use evidence::{Evidence, TrialOutcome};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BackendSetting {
    Auto,
    Fixed(Backend),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("is none of auto, nftables, iptables-nft and iptables-legacy")]
pub struct InvalidBackendSetting;

impl FromStr for BackendSetting {
    type Err = InvalidBackendSetting;

    fn from_str(text: &str) -> Result<Self, InvalidBackendSetting> {
        let fixed = Backend::ALL.into_iter();
        let mut all = fixed.map(Self::Fixed).chain([Self::Auto]);
        all.find(|setting| setting.to_string() == text)
            .ok_or(InvalidBackendSetting)
    }
}

impl fmt::Display for BackendSetting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Fixed(backend) => backend.fmt(f),
        }
    }
}

#[derive(Debug)]
pub(crate) struct SelectedBackend {
    pub(crate) writer: Writer,
    /// If not usable: why, and what to do about it.
    pub(crate) usable: Result<(), String>,
}

/// Uses the detection cache in `directory`. Blocks while iptables programs run, which is only needed where
/// the kernel refuses nf_tables.
pub(crate) fn select_backend(setting: BackendSetting, directory: &Path) -> SelectedBackend {
    let programs = Programs::search(&directory.join("locks"));
    let (configured, detected, usable) = match setting {
        BackendSetting::Fixed(backend) => {
            (Some(backend), backend, check_programs(backend, &programs))
        }
        BackendSetting::Auto => {
            let Detection { backend, evidence } = detect(directory, &programs);
            (None, backend, check_usable(backend, &evidence))
        }
    };
    tracing::info!(%setting, backend = %detected, "Selected a backend");
    SelectedBackend {
        writer: Writer {
            configured,
            detected,
            programs,
            sysctls: Sysctls::default(),
        },
        usable,
    }
}

/// Prefers nf_tables: no program, no lock, atomic. Where the kernel refuses it, iptables-nft fails too, as its
/// rules are nf_tables rules.
fn preferred_backend(evidence: &Evidence) -> Backend {
    if evidence.nftables == TrialOutcome::Usable {
        Backend::Nftables
    } else if evidence.of(Variant::Legacy).trial == TrialOutcome::Usable {
        Backend::IptablesLegacy
    } else {
        Backend::IptablesNft
    }
}

/// Returns this boot's cached result, or detects. Does not cache that no backend is usable: a module may get loaded,
/// or a right granted.
fn detect(directory: &Path, programs: &Programs) -> Detection {
    let file = cache::DetectionCache::in_directory(directory);
    if let Some(detection) = file.read() {
        return detection;
    }
    let evidence = Evidence::collect(programs);
    let detection = Detection {
        backend: preferred_backend(&evidence),
        evidence,
    };
    if check_usable(detection.backend, &detection.evidence).is_ok() {
        file.write(&detection);
    }
    detection
}

fn check_programs(backend: Backend, programs: &Programs) -> Result<(), String> {
    let missing = variant_of(backend).map(|variant| programs.missing(variant));
    match missing {
        Some(missing) if !missing.is_empty() => Err(format!(
            "{backend} is configured and {} missing: install iptables in netconfig's image, or set backend to nftables",
            missing.join(", ")
        )),
        Some(_) | None => Ok(()),
    }
}

fn check_usable(backend: Backend, evidence: &Evidence) -> Result<(), String> {
    let trial = match variant_of(backend) {
        None => &evidence.nftables,
        Some(variant) => &evidence.of(variant).trial,
    };
    match trial {
        TrialOutcome::Usable => Ok(()),
        TrialOutcome::Untried => Err(format!("{backend} was not tried")),
        TrialOutcome::Refused(why) => Err(format!(
            "no backend can be used on this node; {backend}: {why}: load nf_tables, nft_chain_nat and nf_conntrack, or install iptables in netconfig's image"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused() -> TrialOutcome {
        TrialOutcome::Refused("no".to_owned())
    }

    fn evidence(nftables: TrialOutcome, nft: TrialOutcome, legacy: TrialOutcome) -> Evidence {
        let mut evidence = Evidence {
            nftables,
            ..Evidence::default()
        };
        evidence.iptables_nft.trial = nft;
        evidence.iptables_legacy.trial = legacy;
        evidence
    }

    #[test]
    fn nftables_is_chosen_unless_the_kernel_refuses_it() {
        use TrialOutcome::{Untried, Usable};
        for (nftables, nft, legacy, chosen) in [
            (Usable, Untried, Untried, Backend::Nftables),
            (Usable, Usable, Usable, Backend::Nftables),
            (Usable, refused(), refused(), Backend::Nftables),
            (refused(), refused(), Usable, Backend::IptablesLegacy),
            (refused(), Usable, Usable, Backend::IptablesLegacy),
            (refused(), Usable, refused(), Backend::IptablesNft),
            (refused(), refused(), refused(), Backend::IptablesNft),
            (Untried, Untried, Untried, Backend::IptablesNft),
        ] {
            let evidence = evidence(nftables, nft, legacy);
            assert_eq!(preferred_backend(&evidence), chosen, "{evidence:?}");
        }
    }

    #[test]
    fn legacy_tables_of_the_node_do_not_decide() {
        let mut evidence = evidence(
            TrialOutcome::Usable,
            TrialOutcome::Untried,
            TrialOutcome::Usable,
        );
        evidence.node_has_legacy_tables = true;
        assert_eq!(preferred_backend(&evidence), Backend::Nftables);
    }

    #[test]
    fn settings_are_read_by_their_names_and_no_others() {
        for text in ["auto", "nftables", "iptables-nft", "iptables-legacy"] {
            assert_eq!(text.parse::<BackendSetting>().unwrap().to_string(), text);
        }
        for bad in ["", "nft", "iptables", "Auto"] {
            assert_eq!(bad.parse::<BackendSetting>(), Err(InvalidBackendSetting));
        }
    }

    #[test]
    fn what_cannot_be_used_is_told_with_what_to_do() {
        let none = Programs::default();
        assert_eq!(check_programs(Backend::Nftables, &none), Ok(()));
        let why = check_programs(Backend::IptablesLegacy, &none).unwrap_err();
        assert!(why.contains("iptables-legacy-restore"), "{why}");
        assert!(why.contains("install iptables"), "{why}");
        let evidence = evidence(refused(), refused(), refused());
        assert!(check_usable(Backend::IptablesNft, &evidence).is_err());
    }

    #[test]
    fn what_was_found_in_this_boot_is_found_again() {
        let directory = tempfile::tempdir().unwrap();
        let file = cache::DetectionCache::in_directory(directory.path());
        assert!(file.read().is_none());
        let detection = Detection {
            backend: Backend::IptablesLegacy,
            evidence: evidence(refused(), TrialOutcome::Untried, TrialOutcome::Usable),
        };
        file.write(&detection);
        assert_eq!(file.read().unwrap(), detection);
        let path = directory.path().join("backend.json");
        let text = std::fs::read_to_string(&path).unwrap();
        let boot = cache::boot_id().unwrap();
        std::fs::write(&path, text.replace(&boot, "another-boot")).unwrap();
        assert!(file.read().is_none());
        std::fs::write(&path, "{").unwrap();
        assert!(file.read().is_none());
    }
}
