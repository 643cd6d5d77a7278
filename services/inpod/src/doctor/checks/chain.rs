//! Checks which plugins the runtime calls for the next pod.

use super::super::{
    chain::Network,
    check::Check,
    codes::Code,
    facts::{Facts, Kind},
};

pub(super) fn checks(facts: &Facts) -> Vec<Check> {
    let mut checks = vec![runtime(facts)];
    checks.extend(networks(facts));
    checks.extend(plugin(facts));
    checks.push(match &facts.kill_switch {
        Ok(false) => Check::ok(Code::KillSwitch, "", "off"),
        Ok(true) => Check::problem(
            Code::KillSwitch,
            "",
            "on: the plugin's state directory contains the file `disabled`",
        ),
        Err(why) => Check::unknown(Code::KillSwitch, "", why),
    });
    checks
}

fn runtime(facts: &Facts) -> Check {
    let found = facts.runtimes.join(", ");
    if found.is_empty() {
        return Check::problem(
            Code::RuntimeMissing,
            "",
            "found no socket of containerd, CRI-O, cri-dockerd or k3s",
        );
    }
    Check::ok(Code::RuntimeMissing, "", found)
}

fn networks(facts: &Facts) -> Vec<Check> {
    let chain = &facts.chain;
    let place = format!("{} ({})", chain.directory, chain.source);
    match &chain.networks {
        Err(why) => vec![Check::unknown(Code::ChainMissing, "", why)],
        Ok(None) => vec![Check::problem(
            Code::CniDirectoryMissing,
            &chain.directory,
            format!("{place} does not exist"),
        )],
        Ok(Some(networks)) => {
            let mut checks = vec![Check::ok(
                Code::CniDirectoryMissing,
                &chain.directory,
                place,
            )];
            checks.extend(taken(networks));
            checks.push(exclusive(networks, &chain.renamed));
            checks
        }
    }
}

fn taken(networks: &[Network]) -> Vec<Check> {
    let first = networks.iter().position(|it| it.plugins.is_ok());
    let ahead = networks
        .get(..first.unwrap_or(networks.len()))
        .unwrap_or_default();
    let invalid: Vec<_> = ahead
        .iter()
        .filter_map(|it| Some(format!("{}: {}", it.file, it.plugins.as_ref().err()?)))
        .collect();
    let mut checks = vec![Check::whether(
        !invalid.is_empty(),
        Code::ChainFileInvalid,
        "",
        if invalid.is_empty() {
            "no invalid file sorts before the one in use".to_owned()
        } else {
            invalid.join("; ")
        },
    )];
    let Some(taken) = first.and_then(|index| networks.get(index)) else {
        checks.push(Check::problem(
            Code::ChainMissing,
            "",
            "found no valid network configuration",
        ));
        return checks;
    };
    let plugins = taken.plugins.as_deref().unwrap_or_default().join(", ");
    let shown = format!("the runtime uses {}: {plugins}", taken.file);
    checks.push(Check::ok(Code::ChainMissing, "", &shown));
    checks.push(with_us(networks, taken, &shown));
    let agents = taken.agents();
    checks.push(Check::whether(
        !agents.is_empty(),
        Code::ChainSecondAgent,
        "",
        match agents.as_slice() {
            [] => "the chain has no plugin of another mesh".to_owned(),
            agents => format!("{} also calls {}", taken.file, agents.join(", ")),
        },
    ));
    let calls = taken.calls();
    checks.push(Check::whether(
        calls > 1,
        Code::ChainTwice,
        "",
        format!("{} calls inpod-cni {calls} times", taken.file),
    ));
    checks
}

fn with_us(networks: &[Network], taken: &Network, shown: &str) -> Check {
    let (without, shadowed) = (Code::ChainWithoutInpod, Code::ChainShadowed);
    if taken.calls() > 0 {
        return Check::ok(without, "", shown);
    }
    let others: Vec<_> = networks.iter().filter(|it| it.calls() > 0).collect();
    if taken.is_meta() && others.iter().any(|it| it.is_ours_alone()) {
        let why = format!(
            "{shown}; it selects the network of each pod by its own rules, which doctor does not read"
        );
        return Check::unknown(without, "", why);
    }
    match others.first() {
        Some(ours) => Check::problem(
            shadowed,
            "",
            format!("{shown}; inpod-cni is in {}, which sorts later", ours.file),
        ),
        None => Check::problem(without, "", shown),
    }
}

fn exclusive(networks: &[Network], renamed: &[String]) -> Check {
    let code = Code::ChainExclusive;
    if renamed.is_empty() {
        return Check::ok(
            code,
            "",
            format!("{} files, none renamed by Cilium", networks.len()),
        );
    }
    Check::problem(code, "", format!("renamed: {}", renamed.join(", ")))
}

fn plugin(facts: &Facts) -> Vec<Check> {
    let (path, plugin) = (&facts.plugin.path, &facts.plugin);
    let inode = match &plugin.binary {
        Err(why) => return vec![Check::unknown(Code::PluginMissing, "", why)],
        Ok(None) => {
            return vec![Check::problem(
                Code::PluginMissing,
                "",
                format!("{path} does not exist"),
            )];
        }
        Ok(Some(inode)) => inode,
    };
    let mode = format!("{path}, mode {:04o}", inode.mode);
    let mut checks = vec![Check::ok(Code::PluginMissing, "", &mode)];
    let runs = inode.kind == Kind::File && inode.mode & 0o111 != 0;
    checks.push(Check::whether(!runs, Code::PluginNotExecutable, "", mode));
    if runs {
        checks.push(answer(path, &plugin.answer));
    }
    checks
}

fn answer(path: &str, answer: &Result<String, String>) -> Check {
    let code = Code::PluginSilent;
    match answer {
        Ok(answer) if answer.contains("supportedVersions") => {
            Check::ok(code, "", format!("{path} answers VERSION"))
        }
        Ok(answer) => Check::problem(code, "", format!("{path} answered {answer:?}")),
        Err(why) => Check::problem(code, "", format!("{path}: {why}")),
    }
}
