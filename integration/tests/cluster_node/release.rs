//! A release's life on a node: it comes, is upgraded, hands over, goes, and comes again.

use std::fs;

use anyhow::ensure;
use integration::{
    PATIENCE, eventually,
    kubernetes::{Image, LONG, Machine, NODE, VERSION, get, is, text},
};
use serde_json::json;

use crate::{
    agent::{AGENT, SYSTEM, Turn, on_the_node, uid},
    apps::{address, container, create, deploy},
    mesh::{serves_through_ztunnel, taken, traffic, unbroken},
    trace,
};

/// The release after this one.
const NEXT: &str = "0.1.1";

/// The file that the installer owns.
const OWNED: &str = "cni/net.d/02-inpod.conflist";

/// Which plugin is on the node, by the tag that it ends in.
fn plugin_is_of(turn: &Turn<'_>, tag: &str) -> anyhow::Result<()> {
    let plugin = fs::read(turn.machine.file("opt/cni/bin/inpod-cni"))?;
    ensure!(plugin.ends_with(tag.as_bytes()), "another plugin");
    Ok(())
}

/// Whether the chain is the primary's, as the primary wrote it, and nobody else's.
fn chain_is_the_primarys(turn: &Turn<'_>) {
    let primary = turn.machine.etc("cni/net.d/10-podnet.conflist").unwrap();
    assert_eq!(fs::read_to_string(&primary).unwrap(), Machine::primary());
    let names = turn.machine.exec(&["ls", "-A", "/etc/cni/net.d"]).unwrap();
    assert_eq!(names.trim(), "10-podnet.conflist");
}

#[test]
fn an_upgrade_and_the_way_back_change_images_plugin_and_chain_without_a_failed_new_connection() {
    on_the_node(|turn| {
        turn.make_namespace("upgrade", &json!({"istio.io/dataplane-mode": "ambient"}))
            .unwrap();
        let pod = deploy(turn, "upgrade", "web", &container(&json!({})));
        turn.until_enrolled(&pod);
        for name in crate::agent::SHIPPED {
            turn.machine
                .load(&Image::Shipped { name, tag: NEXT })
                .unwrap();
        }
        let traffic = traffic(turn, &pod);
        let set = format!("tag={NEXT}");
        for (tag, level, values) in [
            (NEXT, "debug", &[set.as_str(), "logging.level=debug"][..]),
            (VERSION, "info", &[][..]),
        ] {
            let before = turn.agent();
            turn.upgrade(values);
            // A pod that comes while the agent is replaced waits for it, and does not slip past.
            create(
                turn,
                "upgrade",
                &format!("during-{level}"),
                &json!({}),
                &container(&json!({})),
            );
            turn.until_replaced(&before);
            turn.until_whole();
            let images = turn.images();
            let is_of = |image: &String| image.ends_with(&format!(":{tag}"));
            assert!(images.iter().all(is_of), "{images:?}");
            eventually("plugin and chain are the release's", PATIENCE, || {
                plugin_is_of(turn, tag)?;
                let chain = fs::read_to_string(turn.machine.etc(OWNED)?)?;
                ensure!(
                    chain.contains(&format!(r#""logLevel":"{level}""#)),
                    "{chain}"
                );
                anyhow::Ok(())
            })
            .unwrap();
            turn.until_enrolled(&pod);
            serves_through_ztunnel(turn, &pod);
            let next = turn
                .until_ready("upgrade", &format!("app=during-{level}"), 1)
                .unwrap();
            let next = next.first().unwrap();
            turn.until_enrolled(next);
            serves_through_ztunnel(turn, next);
        }
        unbroken(traffic);
        turn.remove("upgrade");
    });
}

#[test]
fn a_handover_leaves_rules_listeners_and_annotations_and_gives_the_chain_back() {
    on_the_node(|turn| {
        turn.make_namespace("given", &json!({"istio.io/dataplane-mode": "ambient"}))
            .unwrap();
        let pod = deploy(turn, "given", "web", &container(&json!({})));
        turn.until_enrolled(&pod);
        let (rules, traffic) = (trace::of(turn, &pod), traffic(turn, &pod));
        let handover = ["handover", "--timeout", "120s"];
        let said = turn.person(&[&handover[..], &["--namespace", SYSTEM]].concat());
        let said = said.unwrap();
        assert!(said.contains("1 of 1 nodes done"), "{said}");
        assert_eq!(trace::of(turn, &pod), rules);
        let shown = "/metadata/annotations/ambient.istio.io~1redirection";
        let now = turn.pod("given", text(&pod, "/metadata/name")).unwrap();
        assert_eq!(text(&now, shown), "enabled");
        serves_through_ztunnel(turn, &pod);
        // On a node that never had another agent.
        chain_is_the_primarys(turn);
        assert!(!turn.machine.file("opt/cni/bin/inpod-cni").exists());
        let between = deploy(turn, "given", "between", &container(&json!({})));
        let tables = turn.in_netns(&between, &["nft", "list", "tables"]);
        assert_eq!(tables, "");
        // The successor is here.
        turn.delete_release();
        assert_eq!(trace::of(turn, &pod), rules);
        serves_through_ztunnel(turn, &pod);
        turn.install();
        turn.until_whole();
        // The one is remembered, of this boot; of the other the agent was never told.
        turn.until_enrolled(&pod);
        turn.until_found(&between);
        serves_through_ztunnel(turn, &pod);
        serves_through_ztunnel(turn, &between);
        unbroken(traffic);
        let next = deploy(turn, "given", "next", &container(&json!({})));
        turn.until_enrolled(&next);
        turn.remove("given");
    });
}

#[test]
fn the_chart_s_job_leaves_a_node_as_it_was_and_a_new_install_takes_its_pods_in_again() {
    on_the_node(|turn| {
        turn.make_namespace("gone", &json!({"istio.io/dataplane-mode": "ambient"}))
            .unwrap();
        turn.make_namespace("never", &json!({})).unwrap();
        let pod = deploy(turn, "gone", "web", &container(&json!({})));
        let never = deploy(turn, "never", "web", &container(&json!({})));
        turn.until_enrolled(&pod);
        let traffic = traffic(turn, &pod);
        let said = turn.uninstall();
        assert!(said.contains("1 of 1 nodes done"), "{said}");
        chain_is_the_primarys(turn);
        assert_eq!(trace::of_the_node(turn), *turn.clean());
        assert_eq!(trace::of(turn, &pod), trace::of(turn, &never));
        assert_eq!(trace::annotated(turn), []);
        let before = taken(turn, &pod, 15006);
        assert_eq!(get(&turn.outside, address(&pod)).unwrap().trim(), "here");
        assert_eq!(taken(turn, &pod, 15006), before);
        // Its namespace's label is nobody's now.
        let between = deploy(turn, "gone", "between", &container(&json!({})));
        assert_eq!(turn.in_netns(&between, &["nft", "list", "tables"]), "");
        turn.install();
        turn.until_whole();
        // Nothing is remembered of either.
        turn.until_found(&pod);
        turn.until_found(&between);
        serves_through_ztunnel(turn, &pod);
        unbroken(traffic);
        let next = deploy(turn, "gone", "next", &container(&json!({})));
        turn.until_enrolled(&next);
        serves_through_ztunnel(turn, &next);
        for namespace in ["gone", "never"] {
            turn.remove(namespace);
        }
    });
}

#[test]
fn an_agent_that_is_there_before_the_primary_waits_for_it_and_so_do_pods_and_the_node() {
    on_the_node(|turn| {
        turn.uninstall();
        turn.machine.remove_primary().unwrap();
        eventually("the node has no network", LONG, || {
            let node = turn.server.get(&format!("/api/v1/nodes/{NODE}"))?;
            ensure!(!is(&node, "Ready"), "it is ready");
            anyhow::Ok(())
        })
        .unwrap();
        turn.install();
        turn.make_namespace("early", &json!({"istio.io/dataplane-mode": "ambient"}))
            .unwrap();
        create(
            turn,
            "early",
            "web",
            &json!({"nodeName": NODE}),
            &container(&json!({})),
        );
        eventually("the agent runs, and its installer waits", LONG, || {
            let agents = turn.pods(SYSTEM, AGENT)?;
            let statuses = agents
                .first()
                .and_then(|it| it.pointer("/status/containerStatuses"));
            let statuses = statuses.and_then(serde_json::Value::as_array);
            let mut ready = statuses.into_iter().flatten().map(|it| {
                (
                    text(it, "/name").to_owned(),
                    it.get("ready") == Some(&json!(true)),
                )
            });
            let expected = [
                ("installer", false),
                ("netconfig", true),
                ("pod-events", true),
                ("ztunnel-broker", true),
            ];
            let ready: Vec<_> = ready.by_ref().collect();
            ensure!(
                ready == expected.map(|(name, is)| (name.to_owned(), is)),
                "{ready:?}"
            );
            let said = turn.machine.log_of(uid(agents.first().unwrap()))?;
            ensure!(said.contains("waiting for the primary CNI"), "{said}");
            anyhow::Ok(())
        })
        .unwrap();
        let pod = turn.pod("early", "web").unwrap();
        assert!(text(&pod, "/status/podIP").is_empty(), "{pod}");
        turn.machine.write_primary().unwrap();
        turn.until_whole();
        let pods = turn.until_ready("early", "app=web", 1).unwrap();
        let pod = pods.first().unwrap();
        turn.until_enrolled(pod);
        serves_through_ztunnel(turn, pod);
        turn.remove("early");
    });
}
