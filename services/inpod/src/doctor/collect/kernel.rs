//! Gathers facts about the kernel's release, features and security modules.

use std::collections::BTreeMap;

use super::super::facts::Presence;
use crate::host_fs::{HostFs, Observed};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Need {
    /// The rules of every pod need the feature.
    Always,
    /// Only the named setting or purpose needs the feature.
    For(&'static str),
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Feature {
    pub(crate) name: &'static str,
    /// The module that provides the feature if the feature is not built in.
    pub(crate) module: &'static str,
    /// A function of the feature that stays in memory, by its name in /proc/kallsyms.
    symbol: &'static str,
    pub(crate) need: Need,
}

const fn always(name: &'static str, module: &'static str, symbol: &'static str) -> Feature {
    let need = Need::Always;
    Feature {
        name,
        module,
        symbol,
        need,
    }
}

const fn with(
    setting: &'static str,
    name: &'static str,
    module: &'static str,
    symbol: &'static str,
) -> Feature {
    let need = Need::For(setting);
    Feature {
        name,
        module,
        symbol,
        need,
    }
}

/// Optional: without the feature, netconfig writes fewer rules.
const GUARD: &str = "refusing connections to other listeners on ztunnel's ports";

pub(crate) const FEATURES: [Feature; 11] = [
    always("nfnetlink", "nfnetlink", "nfnetlink_rcv_msg"),
    always("nf_tables", "nf_tables", "nft_do_chain"),
    always("nf_conntrack", "nf_conntrack", "nf_conntrack_in"),
    always(
        "conntrack over netlink",
        "nf_conntrack_netlink",
        "ctnetlink_new_conntrack",
    ),
    always("nat", "nf_nat", "nf_nat_inet_fn"),
    always("nft nat chains", "nft_chain_nat", "nft_nat_do_chain"),
    always("nft redirect", "nft_redir", "nft_redir_eval"),
    always("socket diagnosis", "tcp_diag", "tcp_diag_get_info"),
    with(GUARD, "nft socket", "nft_socket", "nft_socket_eval"),
    with(
        GUARD,
        "nft reject",
        "nft_reject_inet",
        "nft_reject_inet_eval",
    ),
    with(
        "TPROXY for sidecars",
        "nft tproxy",
        "nft_tproxy",
        "nft_tproxy_eval",
    ),
];

/// Returns the kernel's release, and the presence of each feature.
pub(super) fn kernel(root: &HostFs) -> (Observed<String>, BTreeMap<&'static str, Presence>) {
    let release = root.text("/proc/sys/kernel/osrelease");
    let symbols = root.text("/proc/kallsyms");
    let modules = release.clone().and_then(|release| {
        let directory = format!("/lib/modules/{}", release.trim());
        let built_in = root.text(format!("{directory}/modules.builtin"))?;
        Ok((built_in, root.text(format!("{directory}/modules.dep"))?))
    });
    let sources = Sources {
        loaded: root.text("/proc/modules").unwrap_or_default(),
        symbols,
        modules,
    };
    let features = FEATURES.iter().map(|it| (it.name, sources.presence(it)));
    (release, features.collect())
}

struct Sources {
    /// The content of `/proc/modules`; empty if the file cannot be read.
    loaded: String,
    symbols: Observed<String>,
    /// The contents of `modules.builtin` and `modules.dep`.
    modules: Observed<(String, String)>,
}

impl Sources {
    fn presence(&self, feature: &Feature) -> Presence {
        let is_loaded = |line: &str| line.split(' ').next() == Some(feature.module);
        if self.loaded.lines().any(is_loaded) {
            return Presence::There("module loaded");
        }
        let symbols = self.symbols.as_deref().unwrap_or_default();
        // In /proc/kallsyms, a tab and the module follow the name of a module's function.
        let mut ends = ['\n', '\t'].iter();
        if ends.any(|end| symbols.contains(&format!(" {}{end}", feature.symbol))) {
            return Presence::There("found in /proc/kallsyms");
        }
        let file = format!("/{}.ko", feature.module);
        match (&self.modules, &self.symbols) {
            (Ok((built_in, _)), _) if built_in.contains(&file) => Presence::There("built in"),
            (Ok((_, files)), _) if files.contains(&file) => {
                let line = files.lines().find(|line| line.contains(&file));
                let name = line
                    .and_then(|line| line.split(':').next())
                    .unwrap_or(&file);
                Presence::Loadable(name.to_owned())
            }
            // If not even nf_hook_slow is listed, this user cannot read the table, and a missing symbol proves nothing.
            (Ok(_), _) => Presence::Absent,
            (Err(_), Ok(symbols)) if symbols.contains(" nf_hook_slow") => Presence::Absent,
            (Err(why), _) => Presence::Unknown(why.clone()),
        }
    }
}

pub(super) fn selinux(root: &HostFs) -> Observed<bool> {
    let enforce = root.text_if_there("/sys/fs/selinux/enforce")?;
    Ok(enforce.is_some_and(|text| text.trim() == "1"))
}

pub(super) fn apparmor(root: &HostFs) -> Observed<bool> {
    let enabled = root.text_if_there("/sys/module/apparmor/parameters/enabled")?;
    Ok(enabled.is_some_and(|text| text.trim() == "Y"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sources(symbols: Observed<&str>, modules: Observed<(&str, &str)>) -> Sources {
        Sources {
            loaded: "nft_redir 16384 3 - Live 0x0\n".to_owned(),
            symbols: symbols.map(str::to_owned),
            modules: modules.map(|(a, b)| (a.to_owned(), b.to_owned())),
        }
    }

    fn found(sources: &Sources, module: &str) -> Presence {
        sources.presence(FEATURES.iter().find(|it| it.module == module).unwrap())
    }

    #[test]
    fn a_part_is_known_by_its_module_its_functions_or_the_files_of_the_release() {
        let there = sources(
            Ok("0000 t nf_nat_inet_fn\n"),
            Ok((
                "kernel/net/nf_tables.ko\n",
                "kernel/net/nft_tproxy.ko.xz: kernel/x.ko\n",
            )),
        );
        assert_eq!(found(&there, "nft_redir"), Presence::There("module loaded"));
        assert!(matches!(found(&there, "nf_nat"), Presence::There(_)));
        assert_eq!(found(&there, "nf_tables"), Presence::There("built in"));
        let Presence::Loadable(file) = found(&there, "nft_tproxy") else {
            panic!("not loadable");
        };
        assert_eq!(file, "kernel/net/nft_tproxy.ko.xz");
        assert_eq!(found(&there, "tcp_diag"), Presence::Absent);
    }

    #[test]
    fn a_kernel_without_modules_is_judged_by_its_functions_and_one_that_shows_none_is_not() {
        let monolithic = sources(Ok("0000 T nf_hook_slow\n"), Err("cannot read".to_owned()));
        assert_eq!(found(&monolithic, "nf_tables"), Presence::Absent);
        for symbols in [Ok(""), Err("cannot read".to_owned())] {
            let blind = sources(symbols, Err("cannot read".to_owned()));
            assert!(matches!(found(&blind, "nf_tables"), Presence::Unknown(_)));
        }
    }
}
