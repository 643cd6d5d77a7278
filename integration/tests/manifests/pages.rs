//! The pages' tables of permissions, values, alerts and reasons.

use std::{collections::BTreeSet, fmt::Write as _, fs};

use inpod_types::Reason;

use crate::{monitoring::alerts, read, root, table::RIGHTS, text};

const SECURITY: &str = "deploy/docs/security.md";
const MONITORING: &str = "deploy/docs/monitoring.md";
const MIGRATION: &str = "deploy/docs/migrate-from-istio-cni.md";

fn rows(page: &str, heading: &str) -> Vec<Vec<String>> {
    let text = read(page);
    let after = text.split(&format!("\n## {heading}\n")).nth(1);
    let section = after.unwrap_or_else(|| panic!("{page} has no section {heading}"));
    let section = section.split("\n## ").next().unwrap();
    let lines = section.lines().filter(|line| line.starts_with("| "));
    let cells = |line: &str| {
        line.trim_matches('|')
            .split(" | ")
            .map(|cell| cell.trim().to_owned())
            .collect()
    };
    lines.skip(1).map(cells).collect()
}

fn quoted(text: &str) -> BTreeSet<String> {
    text.split('`')
        .skip(1)
        .step_by(2)
        .map(str::to_owned)
        .collect()
}

fn capabilities(container: &str) -> BTreeSet<String> {
    let mut all = RIGHTS.iter();
    let rights = all.find(|rights| rights.container == container).unwrap();
    rights
        .capabilities
        .iter()
        .map(|name| (*name).to_owned())
        .collect()
}

#[test]
fn the_page_gives_each_process_the_rights_of_the_table() {
    let rows = rows(SECURITY, "Processes and their rights");
    for rights in &RIGHTS {
        let name = format!("`{}`", rights.container);
        let row = rows.iter().find(|row| row[0] == name);
        let row = row.unwrap_or_else(|| panic!("{name} has no row"));
        assert_eq!(quoted(&row[2]), capabilities(rights.container), "{name}");
        assert_eq!(row[1] == "none", !rights.has_token, "{name}");
    }
}

#[test]
fn the_page_names_a_call_for_each_capability() {
    let rows = rows(SECURITY, "Rights per container");
    let mut container = String::new();
    let mut found = Vec::new();
    for row in rows {
        if !row[0].is_empty() {
            container = quoted(&row[0]).into_iter().next().unwrap();
        }
        assert!(!row[2].is_empty(), "{row:?}");
        found.extend(
            quoted(&row[1])
                .into_iter()
                .map(|name| (container.clone(), name)),
        );
    }
    let table = RIGHTS.iter().flat_map(|rights| {
        let names = capabilities(rights.container).into_iter();
        names.map(|name| (rights.container.to_owned(), name))
    });
    let found: BTreeSet<_> = found.into_iter().collect();
    assert_eq!(found, table.collect());
}

#[test]
fn the_page_names_every_path_of_the_node_that_a_container_is_given() {
    let rows = rows(SECURITY, "Paths of the node");
    for rights in &RIGHTS {
        let of: BTreeSet<_> = rows
            .iter()
            .filter(|row| quoted(&row[1]).contains(rights.container))
            .flat_map(|row| quoted(&row[0]))
            .collect();
        for (place, _) in rights.mounts {
            let place = place.trim_start_matches("/host");
            let place = match place {
                "CONF" => "cniConfDir",
                "BIN" => "cniBinDir",
                "NETNS" => "cniNetnsDir",
                path => path,
            };
            assert!(
                of.contains(place),
                "{} has {place}, which the page does not say",
                rights.container
            );
        }
        assert_eq!(of.len(), rights.mounts.len(), "{}", rights.container);
    }
}

#[test]
fn every_alert_has_its_paragraph() {
    let page = read(MONITORING);
    for alert in alerts() {
        let name = text(&alert, "/alert");
        assert!(page.contains(&format!("\n### {name}\n")), "{name}");
    }
}

/// Compares or writes the table after a mark.
#[expect(
    clippy::disallowed_methods,
    reason = "asks whether to rewrite the page"
)]
fn compare(page: &str, mark: &str, table: &str) {
    let mark = format!(
        "<!-- {mark}: integration/tests/manifests/pages.rs compares this table with the code -->\n"
    );
    let text = read(page);
    let (before, rest) = text.split_once(&mark).unwrap();
    let (written, after) = rest.split_at(rest.find("\n\n").unwrap() + 1);
    if std::env::var("UPDATE_DOCS").is_ok() {
        fs::write(root().join(page), format!("{before}{mark}{table}{after}")).unwrap();
        return;
    }
    assert_eq!(
        written, table,
        "UPDATE_DOCS=1 cargo test -p integration --test manifests"
    );
}

#[test]
fn every_reason_is_listed_with_its_remedy() {
    let mut table = "| Reason | What to do |\n|---|---|\n".to_owned();
    for reason in Reason::ALL {
        writeln!(table, "| `{}` | {} |", reason.name(), reason.remedy()).unwrap();
    }
    compare("deploy/docs/troubleshooting.md", "reasons", &table);
}

/// Returns a number that the list and watch declares.
fn declared(what: &str) -> u32 {
    let code = read("services/pod-events/src/source/kubernetes/list_watch.rs");
    let (_, after) = code.split_once(&format!("const {what}: u32 = ")).unwrap();
    after.split(';').next().unwrap().parse().unwrap()
}

/// The agents' load on the API server, from how pod-events lists and watches. A node has 110
/// pods, the kubelet's default.
#[test]
fn the_load_at_the_api_server_is_what_the_code_makes_of_it() {
    let lasts = declared("WATCH_SECONDS");
    let [objects, metadata] = ["PAGE_OF_OBJECTS", "PAGE_OF_METADATA"].map(declared);
    // Minus a uniformly distributed 0 to a quarter.
    let mean = f64::from(lasts) - f64::from(lasts / 4 - 1) / 2.0;
    let mut table = "| Nodes | Namespaces | Open watches | Requests/s at rest | Requests per agent start | Requests, all agents starting | Messages per namespace change |\n|---|---|---|---|---|---|---|\n".to_owned();
    for (nodes, namespaces) in [(100, 100), (1_000, 1_000), (5_000, 10_000)] {
        let watches = 2 * nodes;
        let rest = f64::from(watches) / mean;
        let start = 110_u32.div_ceil(objects) + u32::div_ceil(namespaces, metadata) + 2;
        let all = nodes * start;
        writeln!(
            table,
            "| {nodes} | {namespaces} | {watches} | {rest:.0} | {start} | {all} | {nodes} |"
        )
        .unwrap();
    }
    compare("deploy/docs/scale.md", "load", &table);
}

/// Values of istio-cni's chart at the compared commit.
const OF_ISTIO: [&str; 53] = [
    "hub",
    "tag",
    "variant",
    "pullPolicy",
    "image",
    "logging.level",
    "cniBinDir",
    "cniConfDir",
    "cniConfFileName",
    "cniNetnsDir",
    "istioOwnedCNIConfig",
    "istioOwnedCNIConfigFileName",
    "excludeNamespaces",
    "affinity",
    "daemonSetLabels",
    "podAnnotations",
    "podLabels",
    "chained",
    "provider",
    "ambient.enabled",
    "ambient.enablementSelectors",
    "ambient.dnsCapture",
    "ambient.ipv6",
    "ambient.reconcileIptablesOnStartup",
    "ambient.shareHostNetworkNamespace",
    "ambient.enableAmbientDetectionRetry",
    "ambient.configDir",
    "repair.enabled",
    "repair.repairPods",
    "repair.labelPods",
    "repair.deletePods",
    "repair.initContainerName",
    "repair.brokenPodLabelKey",
    "repair.brokenPodLabelValue",
    "repair.hub",
    "repair.tag",
    "seccompProfile",
    "seLinuxOptions",
    "useAppArmorAnnotation",
    "resources",
    "resourceQuotas",
    "updateStrategy",
    "terminationGracePeriodSeconds",
    "tolerations",
    "revision",
    "ownerName",
    "env",
    "global.logAsJson",
    "global.networkPolicy.enabled",
    "global.nativeNftables",
    "global.resourceScope",
    "global.imagePullSecrets",
    "global.platform",
];

#[test]
fn the_page_says_of_every_value_of_istio_cni_what_it_is_here() {
    let rows = rows(MIGRATION, "Values of istio-cni");
    let listed: BTreeSet<_> = rows.iter().flat_map(|row| quoted(&row[0])).collect();
    let missing: Vec<_> = OF_ISTIO
        .iter()
        .filter(|name| !listed.contains(**name))
        .collect();
    assert!(missing.is_empty(), "{missing:?}");
}
