//! The calls' CNI version: the conflist's, as far as runtime and plugins know it.

use std::path::PathBuf;

use integration::Spec;
use serde_json::{Value, json};

use crate::runtime::{
    chain::{NETWORK, PRIMARY, veths},
    cnitool::{ALONE, Tool, named, tables},
    containerd::Runtime,
    failures::assert_error,
    recorder::{Recorded, record, recorded},
    sandboxes::in_the_mesh,
};

/// These know CNI 1.1.0; Debian's do not.
fn plugins() -> PathBuf {
    let plugins = std::env::var_os("CNI_PLUGINS");
    plugins
        .expect("CNI_PLUGINS names the directory of containernetworking's plugins: run ./integration/test")
        .into()
}

#[test]
fn a_chain_of_cni_1_1_is_asked_for_its_status_added_checked_and_deleted_in_that_version() {
    let tool = Tool::running();
    tool.chain.with_plugins_of(&plugins()).unwrap();
    let list = tool.chain.list("1.1.0", Some(&[]));
    tool.chain.write(PRIMARY, &list).unwrap();
    record(&tool.chain).unwrap();
    let spec = Spec::new("web").ambient();
    tool.node.write_manifest(&spec).unwrap();
    let (netns, pod) = (tool.netns("web"), named(&spec));
    for verb in ["status", "add", "check"] {
        tool.done(verb, NETWORK, &netns, &pod);
    }
    tool.node.until_whole(&spec).unwrap();
    assert!(tables(&netns).contains("inpod-nat"));
    tool.done("del", NETWORK, &netns, &pod);
    assert_eq!(
        (tool.claimed(), tool.chain.addresses().unwrap().len()),
        (0, 0)
    );
    let calls = recorded(&tool.chain).unwrap();
    let verbs: Vec<_> = calls
        .iter()
        .map(|call| (call.verb.as_str(), call.code))
        .collect();
    assert_eq!(verbs, [("STATUS", 0), ("ADD", 0), ("CHECK", 0), ("DEL", 0)]);
    for call in &calls {
        assert_eq!(call.asked.get("cniVersion"), Some(&json!("1.1.0")));
    }
    let add = calls.iter().find(|call| call.verb == "ADD").unwrap();
    assert_eq!(add.answer.get("cniVersion"), Some(&json!("1.1.0")));
    assert_eq!(add.asked.get("prevResult"), Some(&add.answer));
}

/// Returns the addresses in a result of 0.1.0 or 0.2.0.
fn addresses_in(prev_result: &Value) -> Vec<&str> {
    let keys = ["/ip4/ip", "/ip6/ip"].into_iter();
    keys.filter_map(|key| prev_result.pointer(key)?.as_str()?.split('/').next())
        .collect()
}

#[test]
fn chains_without_version_and_of_0_1_0_and_0_2_0_add_and_delete() {
    let tool = Tool::running();
    record(&tool.chain).unwrap();
    for (name, version, result_version) in [
        ("missing", None, "0.1.0"),
        ("empty", Some(""), "0.1.0"),
        ("first", Some("0.1.0"), "0.1.0"),
        ("second", Some("0.2.0"), "0.2.0"),
    ] {
        let mut list = tool.chain.list(version.unwrap_or_default(), Some(&[]));
        if version.is_none() {
            list.as_object_mut().unwrap().remove("cniVersion");
        }
        tool.chain.write(PRIMARY, &list).unwrap();
        let spec = Spec::new(name).ambient();
        tool.node.write_manifest(&spec).unwrap();
        let (netns, pod) = (tool.netns(name), named(&spec));
        let printed = tool.done("add", NETWORK, &netns, &pod);
        let printed: Value = serde_json::from_str(&printed).unwrap();
        let known = tool.node.until_whole(&spec).unwrap();
        assert!(tables(&netns).contains("inpod-nat"));
        let Recorded { asked, answer, .. } = recorded(&tool.chain).unwrap().pop().unwrap();
        // libcni passes a missing version on as an empty one.
        assert_eq!(
            asked.get("cniVersion"),
            Some(&json!(version.unwrap_or_default()))
        );
        let prev_result = asked.get("prevResult").unwrap();
        let addresses = addresses_in(prev_result);
        assert_eq!(addresses.len(), 2, "{prev_result}");
        assert_eq!(known.addresses, addresses);
        assert_eq!(prev_result.get("cniVersion"), Some(&json!(result_version)));
        assert_eq!((&answer, &printed), (prev_result, prev_result));
        for _ in 0..2 {
            tool.done("del", NETWORK, &netns, &pod);
            assert_eq!(
                (tool.claimed(), tool.chain.addresses().unwrap().len()),
                (0, 0)
            );
        }
        assert!(veths(&tool.node).unwrap().is_empty());
    }
}

#[test]
fn a_list_of_0_1_0_with_our_plugin_alone_gets_an_empty_result() {
    let tool = Tool::running();
    let pod = tool.node.sandbox(Spec::new("web").ambient()).unwrap();
    tool.chain.configure_alone(ALONE, "0.1.0", &[]).unwrap();
    let printed = tool.done("add", ALONE, pod.path(), &named(&pod.spec));
    let printed: Value = serde_json::from_str(&printed).unwrap();
    assert_eq!(printed, json!({"cniVersion": "0.1.0", "dns": {}}));
    tool.node.until_whole(&pod.spec).unwrap();
    tool.done("del", ALONE, pod.path(), &named(&pod.spec));
    assert_eq!(tool.claimed(), 0);
}

#[test]
fn a_list_of_a_version_after_the_newest_is_refused_with_code_1() {
    let tool = Tool::running();
    let pod = tool.node.sandbox(Spec::new("web").ambient()).unwrap();
    record(&tool.chain).unwrap();
    tool.chain.configure_alone(ALONE, "1.2.0", &[]).unwrap();
    let message = tool.refused("add", ALONE, pod.path(), &named(&pod.spec));
    assert!(
        message.contains("supported versions: 0.1.0, 0.2.0, 0.3.0, 0.3.1, 0.4.0, 1.0.0, 1.1.0"),
        "{message}"
    );
    let calls = recorded(&tool.chain).unwrap();
    assert_eq!(calls.last().unwrap().error(), Some(1));
    assert_eq!(tool.claimed(), 0);
}

#[test]
fn containerd_speaks_the_version_of_the_list_up_to_the_last_that_it_knows() {
    let runtime = Runtime::running().unwrap();
    runtime.chain.with_plugins_of(&plugins()).unwrap();
    record(&runtime.chain).unwrap();
    for (number, version) in ["0.4.0", "1.0.0"].into_iter().enumerate() {
        let list = runtime.chain.list(version, Some(&[]));
        runtime.chain.write(PRIMARY, &list).unwrap();
        runtime.restart_containerd().unwrap();
        let pod = runtime
            .pod(Spec::new(&format!("web-{number}")).ambient())
            .unwrap();
        in_the_mesh(&runtime, &pod);
        runtime.end(&pod.container_id).unwrap();
        let calls = recorded(&runtime.chain).unwrap();
        let add = calls.iter().rfind(|call| call.verb == "ADD").unwrap();
        for text in [&add.asked, &add.answer] {
            assert_eq!(text.get("cniVersion"), Some(&json!(version)));
        }
    }
    let list = runtime.chain.list("1.1.0", Some(&[]));
    runtime.chain.write(PRIMARY, &list).unwrap();
    runtime.restart_containerd().unwrap();
    let spec = Spec::new("web").ambient();
    runtime.node.write_manifest(&spec).unwrap();
    match runtime.cri.run(runtime.config(&spec)) {
        Ok(id) => {
            in_the_mesh(&runtime, &runtime.sandbox(spec, &id).unwrap());
            runtime.end(&id).unwrap();
        }
        // containerd before 2.1 passes the conflist's version on and cannot read the first plugin's result.
        Err(refused) => assert_error(
            refused.message(),
            &["plugin type=\"bridge\" failed (add): unsupported CNI result version \"1.1.0\""],
        ),
    }
    // After a failed ADD, our plugin was called at least for the DEL.
    let calls = recorded(&runtime.chain).unwrap();
    let last = calls.last().unwrap();
    assert_eq!((last.verb.as_str(), last.code), ("DEL", 0));
    assert_eq!(last.asked.get("cniVersion"), Some(&json!("1.1.0")));
    runtime.until_empty().unwrap();
}
