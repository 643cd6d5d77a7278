//! Lists the flags of this program and of istio-iptables (services/docs/facts/istio-sidecar.md, 4.1).

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FlagKind {
    Help,
    Version,
    Timeout,
    Families,
    Inbound,
    Outbound,
    Probe,
    RunValidation,
    SkipRules,
    /// The flag configures rules; this program detects the rules or does not need to know them.
    Nothing,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Flag {
    pub(super) long: &'static str,
    pub(super) short: Option<char>,
    /// The equivalent environment variable.
    pub(super) variable: Option<&'static str>,
    /// The next argument is the value, unless the value follows a "=".
    pub(super) takes_value: bool,
    pub(super) kind: FlagKind,
}

const fn flag(long: &'static str, takes_value: bool, kind: FlagKind) -> Flag {
    Flag {
        long,
        short: None,
        variable: None,
        takes_value,
        kind,
    }
}

const fn valued(long: &'static str, short: char) -> Flag {
    Flag {
        short: Some(short),
        ..flag(long, true, FlagKind::Nothing)
    }
}

const fn switch(long: &'static str) -> Flag {
    flag(long, false, FlagKind::Nothing)
}

pub(super) const LOG: Flag = switch("log_*");

pub(super) const FLAGS: &[Flag] = &[
    Flag {
        short: Some('h'),
        ..flag("help", false, FlagKind::Help)
    },
    flag("version", false, FlagKind::Version),
    flag("timeout", true, FlagKind::Timeout),
    Flag {
        variable: Some("PROBE_TIMEOUT"),
        ..flag("probe-timeout", true, FlagKind::Timeout)
    },
    flag("ip-family", true, FlagKind::Families),
    Flag {
        short: Some('p'),
        ..flag("envoy-port", true, FlagKind::Outbound)
    },
    Flag {
        short: Some('z'),
        variable: Some("INBOUND_CAPTURE_PORT"),
        ..flag("inbound-capture-port", true, FlagKind::Inbound)
    },
    Flag {
        variable: Some("IPTABLES_PROBE_PORT"),
        ..flag("iptables-probe-port", true, FlagKind::Probe)
    },
    Flag {
        variable: Some("RUN_VALIDATION"),
        ..flag("run-validation", false, FlagKind::RunValidation)
    },
    Flag {
        variable: Some("SKIP_RULE_APPLY"),
        ..flag("skip-rule-apply", false, FlagKind::SkipRules)
    },
    valued("inbound-tunnel-port", 'e'),
    valued("proxy-uid", 'u'),
    valued("proxy-gid", 'g'),
    valued("istio-inbound-interception-mode", 'm'),
    valued("istio-inbound-ports", 'b'),
    valued("istio-local-exclude-ports", 'd'),
    valued("istio-exclude-interfaces", 'c'),
    valued("istio-service-cidr", 'i'),
    valued("istio-service-exclude-cidr", 'x'),
    valued("istio-outbound-ports", 'q'),
    valued("istio-local-outbound-ports-exclude", 'o'),
    valued("kube-virt-interfaces", 'k'),
    valued("istio-inbound-tproxy-mark", 't'),
    valued("istio-inbound-tproxy-route-table", 'r'),
    Flag {
        short: Some('n'),
        ..switch("dry-run")
    },
    switch("redirect-dns"),
    switch("drop-invalid"),
    switch("dual-stack"),
    switch("capture-all-dns"),
    flag("network-namespace", true, FlagKind::Nothing),
    switch("cni-mode"),
    switch("reconcile"),
    switch("cleanup-only"),
    switch("force-apply"),
    switch("native-nftables"),
    flag("force-iptables-binary", true, FlagKind::Nothing),
];
