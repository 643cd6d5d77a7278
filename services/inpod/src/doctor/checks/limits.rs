use super::super::{
    check::Check,
    codes::Code,
    facts::{Facts, Process},
};

/// The share of a limit from which usage is reported as near the limit.
const NEAR_PERCENT: u64 = 80;

/// Enough for the agent's services and a kubelet, with a reserve (inotify(7)).
const MIN_INOTIFY_INSTANCES: u64 = 128;
const MIN_INOTIFY_WATCHES: u64 = 8192;

pub(super) fn checks(facts: &Facts) -> Vec<Check> {
    let mut checks = vec![
        ipv6(facts),
        rp_filter(facts),
        conntrack(facts),
        inotify(facts),
        files(facts),
    ];
    let services = facts.services.iter();
    let processes = services.filter_map(|it| Some((it.name, it.process.as_ref().ok()?)));
    checks.extend(processes.map(|(name, process)| files_of(name, process)));
    checks
}

fn checked(code: Code, subject: &str, check: Result<Check, String>) -> Check {
    check.unwrap_or_else(|why| Check::unknown(code, subject, why))
}

fn ipv6(facts: &Facts) -> Check {
    let code = Code::Ipv6Disabled;
    let (all, default) = (
        "net/ipv6/conf/all/disable_ipv6",
        "net/ipv6/conf/default/disable_ipv6",
    );
    let has_ipv4 = facts.number("net/ipv4/conf/all/rp_filter").is_ok();
    if has_ipv4 && facts.sysctls.get(all).is_some_and(Result::is_err) {
        return Check::problem(code, "", "the kernel has no IPv6 (no net.ipv6.conf)");
    }
    let judged = facts.number(all).and_then(|all| {
        let default = facts.number(default)?;
        let found =
            format!("net.ipv6.conf: all.disable_ipv6 = {all}, default.disable_ipv6 = {default}");
        Ok(Check::whether(all == 1 || default == 1, code, "", found))
    });
    checked(code, "", judged)
}

fn rp_filter(facts: &Facts) -> Check {
    let code = Code::RpFilterStrict;
    let judged = facts.number("net/ipv4/conf/all/rp_filter").and_then(|all| {
        let default = facts.number("net/ipv4/conf/default/rp_filter")?;
        let found = format!(
            "net.ipv4.conf: all.rp_filter = {all}, default.rp_filter = {default}; the larger value of all and the interface \
             applies"
        );
        Ok(Check::whether(all == 1 || default == 1, code, "", found))
    });
    checked(code, "", judged)
}

fn is_near(used: u64, max: u64) -> bool {
    max > 0 && used.saturating_mul(100) >= max.saturating_mul(NEAR_PERCENT)
}

fn conntrack(facts: &Facts) -> Check {
    let code = Code::ConntrackNearFull;
    let judged = facts
        .number("net/netfilter/nf_conntrack_count")
        .and_then(|count| {
            let max = facts.number("net/netfilter/nf_conntrack_max")?;
            Ok(Check::whether(
                is_near(count, max),
                code,
                "",
                format!("{count} of {max} connections"),
            ))
        });
    checked(code, "", judged)
}

fn inotify(facts: &Facts) -> Check {
    let code = Code::InotifyLow;
    let judged = facts
        .number("fs/inotify/max_user_instances")
        .and_then(|instances| {
            let watches = facts.number("fs/inotify/max_user_watches")?;
            let found = format!("{instances} instances and {watches} watches per user");
            Ok(Check::whether(
                instances < MIN_INOTIFY_INSTANCES || watches < MIN_INOTIFY_WATCHES,
                code,
                "",
                found,
            ))
        });
    checked(code, "", judged)
}

fn files(facts: &Facts) -> Check {
    let code = Code::FilesNearLimit;
    // The first number in file-nr is the number of open files (proc_sys_fs(5)).
    let judged = facts.number("fs/file-nr").and_then(|open| {
        let max = facts.number("fs/file-max")?;
        Ok(Check::whether(
            is_near(open, max),
            code,
            "node",
            format!("{open} of {max} files"),
        ))
    });
    checked(code, "node", judged)
}

fn files_of(name: &str, process: &Process) -> Check {
    let code = Code::FilesNearLimit;
    let judged = process.open_files.clone().and_then(|open| {
        let max = process.file_limit.clone()?;
        Ok(Check::whether(
            is_near(open, max),
            code,
            name,
            format!("{open} of {max} files"),
        ))
    });
    checked(code, name, judged)
}
