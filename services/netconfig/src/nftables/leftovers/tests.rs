use super::*;

fn table(name: &str) -> TableId {
    (TableFamily::Ip, name.to_owned())
}

/// Finds leftovers in one table; each of `jumps` is a pair of the chain with the rule, and the target.
fn find(table_name: &str, chains: &[(&str, u32)], jumps: &[(&str, &str)]) -> Leftovers {
    let chains: Vec<_> = chains
        .iter()
        .map(|(name, uses)| SeenChain {
            table: table(table_name),
            name: (*name).to_owned(),
            uses: *uses,
        })
        .collect();
    let rules: Vec<_> = (1..)
        .zip(jumps)
        .map(|(handle, (chain, target))| SeenRule {
            table: table(table_name),
            chain: (*chain).to_owned(),
            handle,
            meaning: Meaning::jump(target),
        })
        .collect();
    Leftovers::find(std::iter::empty(), &chains, &rules)
}

pub(crate) fn left_by_agent() -> Leftovers {
    find("nat", &[("ISTIO_OUTPUT", 1)], &[("OUTPUT", "ISTIO_OUTPUT")])
}

pub(crate) fn left_by_sidecar() -> Leftovers {
    find("nat", &[(SIDECAR_MARKER, 1)], &[("OUTPUT", SIDECAR_MARKER)])
}

#[test]
fn a_sidecars_chains_are_not_the_node_agents() {
    let chains = [("ISTIO_OUTPUT", 1), (SIDECAR_MARKER, 1)];
    let jumps = [("OUTPUT", "ISTIO_OUTPUT"), ("ISTIO_OUTPUT", SIDECAR_MARKER)];
    let found = find("nat", &chains, &jumps);
    assert!(!found.has(|author| author != Author::Sidecar));
    let names = ["ip nat ISTIO_OUTPUT", "ip nat ISTIO_REDIRECT"];
    assert_eq!(found.names(Author::Sidecar), names);
    // The jump between the two chains is deleted with its chain.
    assert_eq!(found.rules.len(), 1);
}

#[test]
fn names_mean_nothing_outside_of_iptables_tables() {
    let jumps = [("OUTPUT", "ISTIO_OUTPUT")];
    assert!(find("mine", &[("ISTIO_OUTPUT", 1)], &jumps).is_empty());
    assert!(find("nat", &[("THEIRS", 1)], &[("OUTPUT", "THEIRS")]).is_empty());
}

#[test]
fn an_empty_chain_that_nothing_leads_to_is_not_left() {
    assert!(find("nat", &[("ISTIO_OUTPUT", 0)], &[]).is_empty());
    assert!(find("nat", &[("ISTIO_OUTPUT", 1)], &[]).is_empty());
    assert!(!find("nat", &[("ISTIO_OUTPUT", 1)], &[("ISTIO_OUTPUT", "THEIRS")]).is_empty());
}

#[test]
fn a_chain_that_more_than_rules_refer_to_is_emptied_and_stays() {
    let jumps = [("OUTPUT", "ISTIO_OUTPUT"), ("ISTIO_OUTPUT", "THEIRS")];
    let lines = |uses| {
        let found = find("nat", &[("ISTIO_OUTPUT", uses)], &jumps);
        render_deletions(&found).concat()
    };
    let emptied = "delete rule ip nat OUTPUT handle 1\nflush chain ip nat ISTIO_OUTPUT\n";
    assert_eq!(lines(3), emptied);
    assert_eq!(
        lines(2),
        format!("{emptied}delete chain ip nat ISTIO_OUTPUT\n")
    );
}

#[test]
fn tables_of_istio_are_found_by_their_names() {
    let tables = ["istio-ambient-nat", "mine", "istio-proxy-raw"];
    let found = Leftovers::find(tables.into_iter(), &[], &[]);
    assert_eq!(found.names(Author::Agent), ["istio-ambient-nat"]);
    assert_eq!(found.names(Author::Sidecar), ["istio-proxy-raw"]);
    assert!(found.captures(Family::V6, |author| author == Author::Agent));
    let agents = found.select(|author| author == Author::Agent);
    assert_eq!(
        render_deletions(&agents),
        ["delete table inet istio-ambient-nat\n"]
    );
}
