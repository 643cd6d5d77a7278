use super::super::{
    check::Check,
    codes::Code,
    collect::{self, Need},
    facts::{Facts, Presence},
    mounts,
};

/// The first kernel with SO_NETNS_COOKIE, as in `netconfig::kernel_version`.
const MIN_KERNEL: (u32, u32) = (5, 14);

/// The directories in which runtimes mount network namespaces. On most nodes `/var/run` is a link to `/run`.
const NETNS_DIRECTORIES: [&str; 2] = ["/run/netns", "/var/run/netns"];

/// The default profiles of containerd, CRI-O and Docker. containerd's profile (1.6, Linux 6.1) denies writing sysctls
/// of network namespaces, mount(2), and `/proc/<pid>/ns` of other processes.
const DEFAULT_PROFILES: [&str; 3] = [
    "cri-containerd.apparmor.d",
    "crio-default",
    "docker-default",
];

pub(super) fn checks(facts: &Facts) -> Vec<Check> {
    let mut checks = vec![version(facts)];
    checks.extend(
        facts
            .features
            .iter()
            .map(|(name, found)| feature(name, found)),
    );
    checks.push(shared(facts));
    checks.push(seen(facts));
    checks.push(selinux(facts));
    checks.push(apparmor(facts));
    checks
}

fn version(facts: &Facts) -> Check {
    let code = Code::KernelTooOld;
    let release = match &facts.release {
        Ok(release) => release.trim(),
        Err(why) => return Check::unknown(code, "", why),
    };
    let found = format!(
        "Linux {release}; inpod needs {}.{} or later",
        MIN_KERNEL.0, MIN_KERNEL.1
    );
    match numbers(release) {
        Some(version) => Check::whether(version < MIN_KERNEL, code, "", found),
        None => Check::unknown(code, "", format!("cannot parse the version {release:?}")),
    }
}

/// Parses `major.minor`, which the suffix of a distribution may follow.
fn numbers(release: &str) -> Option<(u32, u32)> {
    let mut parts = release.split(|c: char| !c.is_ascii_digit());
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

fn feature(name: &str, found: &Presence) -> Check {
    let feature = collect::FEATURES.iter().find(|known| known.name == name);
    let (need, module) = feature.map_or((Need::Always, ""), |it| (it.need, it.module));
    let (code, purpose) = match need {
        Need::Always => (Code::KernelFeatureMissing, "every pod's rules"),
        Need::For(setting) => (Code::KernelOptionMissing, setting),
    };
    let text = |how: &str| format!("{name} (module {module}, for {purpose}): {how}");
    match found {
        Presence::There(how) => Check::ok(code, name, text(how)),
        Presence::Loadable(file) => {
            Check::ok(code, name, text(&format!("loaded on demand from {file}")))
        }
        Presence::Absent => {
            let nowhere = "neither built in nor available as a module";
            Check::problem(code, name, text(nowhere))
        }
        Presence::Unknown(why) => Check::unknown(code, name, text(why)),
    }
}

fn shared(facts: &Facts) -> Check {
    let code = Code::NetnsNotShared;
    let mounts = match &facts.mounts {
        Ok(mounts) => mounts,
        Err(why) => return Check::unknown(code, "", why),
    };
    let own = mounts
        .iter()
        .any(|mount| mount.point.starts_with("/var/run"));
    let inspected = NETNS_DIRECTORIES.iter().take(if own { 2 } else { 1 });
    let private = inspected.filter_map(|path| {
        let mount = mounts::above(mounts, path)?;
        (!mount.is_shared).then(|| {
            format!(
                "{path} is on the mount {}, which is not shared",
                mount.point
            )
        })
    });
    let private: Vec<_> = private.collect();
    if private.is_empty() {
        return Check::ok(code, "", "the mount of /run/netns is shared");
    }
    Check::problem(code, "", private.join("; "))
}

fn seen(facts: &Facts) -> Check {
    let code = Code::NetnsNotSeen;
    let (host, netconfig) = match (&facts.mounts, &facts.netconfig_mounts) {
        (Ok(host), Ok(netconfig)) => (host, netconfig),
        (Err(why), _) | (_, Err(why)) => return Check::unknown(code, "", why),
    };
    let known = |root: &str| {
        netconfig
            .iter()
            .any(|it| it.kind == "nsfs" && it.root == root)
    };
    let all: Vec<_> = NETNS_DIRECTORIES
        .iter()
        .flat_map(|path| mounts::netns_below(host, path))
        .collect();
    let unseen: Vec<_> = all.iter().filter(|mount| !known(&mount.root)).collect();
    let Some(first) = unseen.first() else {
        return Check::ok(
            code,
            "",
            format!("netconfig sees all {} of the node", all.len()),
        );
    };
    let found = format!(
        "netconfig does not see {} of {}, for example {}",
        unseen.len(),
        all.len(),
        first.point
    );
    Check::problem(code, "", found)
}

fn selinux(facts: &Facts) -> Check {
    let code = Code::LsmSelinuxConfined;
    match &facts.selinux_enforcing {
        Ok(false) => return Check::ok(code, "", "SELinux is not enforcing"),
        Ok(true) => {}
        Err(why) => return Check::unknown(code, "", why),
    }
    match label(facts) {
        Err(why) => Check::unknown(code, "", why),
        // The default domain of containers, container_t of container-selinux, may neither mount nor enter network
        // namespaces.
        Ok(label) => Check::whether(
            label
                .split(':')
                .nth(2)
                .is_some_and(|domain| domain.starts_with("container")),
            code,
            "",
            format!("SELinux is enforcing, netconfig runs as {label}"),
        ),
    }
}

fn apparmor(facts: &Facts) -> Check {
    let code = Code::LsmApparmorConfined;
    match &facts.apparmor {
        Ok(false) => return Check::ok(code, "", "AppArmor is disabled"),
        Ok(true) => {}
        Err(why) => return Check::unknown(code, "", why),
    }
    match label(facts) {
        Err(why) => Check::unknown(code, "", why),
        Ok(label) => confined(code, &label),
    }
}

/// Judges the label in `/proc/<pid>/attr/current`, which is a profile with its mode, or `unconfined`.
fn confined(code: Code, label: &str) -> Check {
    let found = format!("netconfig runs as {label}");
    let is_default = |profile: &str| {
        DEFAULT_PROFILES
            .iter()
            .any(|known| profile.starts_with(known))
    };
    match label.strip_suffix("(enforce)") {
        None => Check::ok(code, "", found),
        Some(profile) if is_default(profile) => Check::problem(code, "", found),
        Some(_) => Check::unknown(
            code,
            "",
            format!("{found}, a profile that doctor does not know"),
        ),
    }
}

fn label(facts: &Facts) -> Result<String, String> {
    let netconfig = facts.service("netconfig");
    let process = netconfig.map_or_else(
        || Err("netconfig was not inspected".to_owned()),
        |it| it.process.clone(),
    );
    process?.label
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::codes::Verdict;

    #[test]
    fn a_runtimes_default_profile_is_wrong_one_of_the_operators_unknown_and_none_right() {
        for (label, verdict) in [
            ("cri-containerd.apparmor.d (enforce)", Verdict::Failed),
            ("crio-default-1.24.6 (enforce)", Verdict::Failed),
            ("docker-default (enforce)", Verdict::Failed),
            ("our-netconfig (enforce)", Verdict::Unknown),
            ("cri-containerd.apparmor.d (complain)", Verdict::Ok),
            ("unconfined", Verdict::Ok),
        ] {
            let check = confined(Code::LsmApparmorConfined, label);
            assert_eq!(check.verdict, verdict, "{label}");
        }
    }
}
