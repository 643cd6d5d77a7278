//! Recognizes pods of sandboxed runtimes by RuntimeClass: the setting `sandboxed_runtime_classes`.
//!
//! gVisor and Kata run a pod's network stack outside the pod's network namespace, where redirection has no effect.

use std::{fmt, str::FromStr};

use inpod_types::is_dns_subdomain;

/// The classes of gVisor (GKE Sandbox, minikube), of Kata (kata-deploy, AKS, OpenShift, peer pods, confidential
/// containers) and of ACK's Sandboxed-Container.
pub const SANDBOXED_RUNTIME_CLASSES: &str = "gvisor,runsc,kata,kata-*,runv";

/// The name of a RuntimeClass or, with a final `*`, the beginning of names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClassPattern(Box<str>);

impl FromStr for ClassPattern {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let is_valid = match text.strip_suffix('*') {
            // A valid prefix is the beginning of a valid name.
            Some(prefix) => is_dns_subdomain(&format!("{prefix}0")),
            None => is_dns_subdomain(text),
        };
        if is_valid {
            Ok(Self(text.into()))
        } else {
            Err(format!(
                "setting sandboxed_runtime_classes: {text:?} is not the name of a RuntimeClass, nor the beginning of names with * at its end"
            ))
        }
    }
}

impl fmt::Display for ClassPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl ClassPattern {
    pub fn matches(&self, class: &str) -> bool {
        match self.0.strip_suffix('*') {
            Some(prefix) => class.starts_with(prefix),
            None => class == &*self.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn patterns(setting: &str) -> Vec<ClassPattern> {
        let texts = setting.split(',');
        texts.map(|text| text.parse().unwrap()).collect()
    }

    #[test]
    fn the_default_covers_the_classes_of_known_distributions() {
        let patterns = patterns(SANDBOXED_RUNTIME_CLASSES);
        let is_sandboxed = |class: &str| patterns.iter().any(|pattern| pattern.matches(class));
        for class in [
            "gvisor",
            "runsc",
            "kata",
            "kata-qemu",
            "kata-clh",
            "kata-fc",
            "kata-dragonball",
            "kata-remote",
            "kata-cc-isolation",
            "kata-mshv-vm-isolation",
            "kata-vm-isolation",
            "runv",
        ] {
            assert!(is_sandboxed(class), "{class}");
        }
        for class in [
            "runc", "crun", "nvidia", "katana", "gvisor2", "wasmtime", "",
        ] {
            assert!(!is_sandboxed(class), "{class}");
        }
    }

    #[test]
    fn patterns_are_names_or_beginnings_of_names() {
        for text in ["kata", "kata-*", "a.b", "k*", "*"] {
            assert_eq!(text.parse::<ClassPattern>().unwrap().to_string(), text);
        }
        for text in [
            "", "Kata", "*-kata", "ka*ta", "kata-", "kata**", "a b", "-*",
        ] {
            let error = text.parse::<ClassPattern>().unwrap_err();
            let named = ["sandboxed_runtime_classes", text];
            assert!(named.iter().all(|word| error.contains(word)), "{error}");
        }
    }
}
