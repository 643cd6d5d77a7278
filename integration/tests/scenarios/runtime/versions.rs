//! The calls' CNI version: the conflist's, as far as runtime and plugins know it.

use std::path::PathBuf;

use integration::Spec;
use serde_json::json;

use crate::runtime::{
    chain::{NETWORK, PRIMARY},
    cnitool::{Tool, named, tables},
    containerd::Runtime,
    failures::assert_error,
    recorder::{record, recorded},
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
