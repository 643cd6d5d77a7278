use std::collections::BTreeMap;

use super::{
    testing::{config, directory},
    *,
};
use crate::{
    INPOD_CNI,
    steps::{self, Cause},
};

const PRIMARY: &str = "{ \"name\": \"k8s\", \"cniVersion\": \"1.0.0\",\n  \"plugins\": [ { \"type\": \"calico\", \"n\": 1e40 } ] }\n";
const WITH_ISTIO_CNI: &str =
    r#"{"name":"k8s","plugins":[{"type":"calico"},{"type":"istio-cni","x":1}]}"#;
const SINGLE: &str = "{\"type\":\"bridge\",\"name\":\"k8s\",\"cniVersion\":\"0.4.0\"}\n";

struct World {
    desired: DesiredChain,
    files: BTreeMap<String, String>,
    record: Record,
}

impl World {
    fn new(settings: &[(&str, &str)], files: &[(&str, &str)]) -> Self {
        let files = files
            .iter()
            .map(|(name, text)| ((*name).to_owned(), (*text).to_owned()));
        Self {
            desired: DesiredChain::new(&config(settings)),
            files: files.collect(),
            record: Record::default(),
        }
    }

    fn directory(&self) -> Directory {
        let file = |(name, text): (&String, &String)| {
            NetworkFile::new(name.clone(), text.clone().into_bytes())
        };
        Directory::of(self.files.iter().map(file).collect())
    }

    fn apply(&mut self, plan: &Plan) -> usize {
        let directory = self.directory();
        let steps = steps::diff(plan, &directory, &self.record);
        for step in &steps {
            match step.content.clone() {
                Some(content) => {
                    let text = String::from_utf8(content).unwrap();
                    self.files.insert(step.name.clone(), text);
                }
                None => drop(self.files.remove(&step.name)),
            }
            // Runtimes must find a network after every step.
            assert!(
                self.desired.first_network(&self.directory().files).is_ok(),
                "after {step:?}"
            );
        }
        self.record.files.clone_from(&plan.changed);
        self.record.joined.clone_from(&plan.joined);
        steps.len()
    }

    /// Applies plans until nothing changes, and returns the number of changes.
    fn settle(&mut self) -> usize {
        let mut made = 0;
        for _ in 0..5 {
            let plan = self.desired.plan(&self.directory(), &self.record).unwrap();
            match self.apply(&plan) {
                0 => {
                    self.desired.check_effective(&self.directory()).unwrap();
                    return made;
                }
                steps => made += steps,
            }
        }
        panic!("never at rest: {:?}", self.files)
    }

    fn leave(&mut self, restore: Restore) {
        let plan = self
            .desired
            .removal(&self.directory(), &self.record, restore);
        self.apply(&plan.unwrap());
        assert!(self.record.files.is_empty());
        assert_eq!(
            self.directory()
                .files
                .iter()
                .filter(|file| file
                    .list()
                    .is_some_and(|list| list.plugin(INPOD_CNI).is_some()))
                .count(),
            0
        );
    }

    fn types(&self, name: &str) -> Vec<String> {
        let directory = self.directory();
        let list = directory.file(name).unwrap().list().unwrap();
        list.plugins.iter().map(|it| it.kind.clone()).collect()
    }
}

fn expect(world: &World, files: &[(&str, &str)]) {
    let expected: BTreeMap<_, _> = files
        .iter()
        .map(|(name, text)| ((*name).to_owned(), (*text).to_owned()))
        .collect();
    assert_eq!(world.files, expected);
}

#[test]
fn in_every_mode_every_file_comes_back_byte_for_byte() {
    for mode in ["owned", "in-place", "standalone"] {
        for files in [
            &[("10-a.conflist", PRIMARY)][..],
            &[("10-a.conf", SINGLE)],
            &[("10-a.json", SINGLE), ("20-b.conflist", PRIMARY)],
        ] {
            let mut world = World::new(&[("mode", mode)], files);
            world.settle();
            assert_eq!(world.settle(), 0);
            world.leave(Restore::Everything);
            expect(&world, files);
        }
    }
}

#[test]
fn the_owned_copy_is_the_primary_and_us_and_follows_every_change() {
    let mut world = World::new(&[], &[("10-a.conflist", PRIMARY)]);
    assert_eq!(world.settle(), 1);
    let copy = world.files["02-inpod.conflist"].clone();
    let expected = "{\n  \"name\": \"k8s\",\n  \"cniVersion\": \"1.0.0\",\n  \"plugins\": [\n    { \"type\": \"calico\", \"n\": 1e40 },\n    {";
    assert!(copy.starts_with(expected), "{copy}");
    let changed = PRIMARY.replace("1.0.0", "1.1.0").replace("1e40", "1e41");
    world.files.insert("10-a.conflist".to_owned(), changed);
    assert_eq!(world.settle(), 1);
    assert!(
        world.files["02-inpod.conflist"].contains("1e41")
            && world.files["02-inpod.conflist"].contains("1.1.0")
    );
    // Another CNI becomes the primary network.
    world.files.remove("10-a.conflist");
    world.files.insert(
        "05-cilium.conflist".to_owned(),
        r#"{"name":"c","plugins":[{"type":"cilium-cni"}]}"#.to_owned(),
    );
    world.settle();
    assert_eq!(
        world.types("02-inpod.conflist"),
        ["cilium-cni", "inpod-cni"]
    );
}

#[test]
fn without_a_primary_nothing_is_changed_and_the_copy_stays() {
    let mut world = World::new(&[], &[("10-a.conflist", PRIMARY)]);
    world.settle();
    world.files.remove("10-a.conflist");
    assert_eq!(
        world.desired.plan(&world.directory(), &world.record),
        Err(PlanError::NoPrimary)
    );
}

#[test]
fn an_owned_file_that_would_not_be_taken_is_refused_with_the_setting() {
    let world = World::new(&[], &[("00-net.conf", SINGLE)]);
    let error = world
        .desired
        .plan(&world.directory(), &world.record)
        .unwrap_err();
    assert!(error.to_string().contains("set owned_file"), "{error}");
    let mut world = World::new(
        &[("owned_file", "00-inpod.conflist")],
        &[("00-net.conf", SINGLE)],
    );
    world.settle();
}

#[test]
fn in_place_follows_whichever_file_comes_first() {
    let mut world = World::new(&[("mode", "in-place")], &[("10-a.conflist", PRIMARY)]);
    world.settle();
    world
        .files
        .insert("05-b.conflist".to_owned(), PRIMARY.to_owned());
    world.settle();
    assert_eq!(world.types("05-b.conflist"), ["calico", "inpod-cni"]);
    assert_eq!(
        world.files["10-a.conflist"], PRIMARY,
        "the file that is not taken any more is as it was"
    );
    world.files.remove("05-b.conflist");
    world.settle();
    assert_eq!(world.types("10-a.conflist"), ["calico", "inpod-cni"]);
}

#[test]
fn a_single_configuration_that_its_owner_writes_anew_is_what_comes_back() {
    for name in ["10-a.conf", "10-a.json"] {
        let mut world = World::new(&[("mode", "in-place")], &[(name, SINGLE)]);
        world.settle();
        assert_eq!(world.types("10-a.conflist"), ["bridge", "inpod-cni"]);
        let newer = SINGLE.replace("0.4.0", "1.0.0");
        world.files.insert(name.to_owned(), newer.clone());
        world.settle();
        assert!(world.files["10-a.conflist"].contains("1.0.0"));
        world.leave(Restore::Everything);
        expect(&world, &[(name, &newer)]);
    }
}

#[test]
fn what_others_changed_since_stays_and_only_our_entry_is_removed() {
    let mut world = World::new(&[("mode", "in-place")], &[("10-a.conflist", PRIMARY)]);
    world.settle();
    let changed = world.files["10-a.conflist"].replace("1e40", "7");
    world.files.insert("10-a.conflist".to_owned(), changed);
    assert_eq!(world.settle(), 0, "our entry is there");
    world.leave(Restore::Everything);
    let left = &world.files["10-a.conflist"];
    assert!(left.contains(r#"{ "type": "calico", "n": 7 }"#), "{left}");
    assert_eq!(world.types("10-a.conflist"), ["calico"]);
}

#[test]
fn an_entry_of_our_own_that_differs_is_rewritten() {
    let mut world = World::new(&[("mode", "in-place")], &[("10-a.conflist", PRIMARY)]);
    world.settle();
    world.desired = DesiredChain::new(&config(&[
        ("mode", "in-place"),
        ("plugin_log_level", "debug"),
    ]));
    let plan = world
        .desired
        .plan(&world.directory(), &world.record)
        .unwrap();
    let steps = steps::diff(&plan, &world.directory(), &world.record);
    assert_eq!(steps[0].cause, Cause::Followed);
    assert_eq!(world.settle(), 1);
    world.leave(Restore::Everything);
    expect(&world, &[("10-a.conflist", PRIMARY)]);
}

#[test]
fn another_mode_takes_back_what_the_one_before_has_made() {
    let modes = ["owned", "in-place", "standalone"];
    for from in modes {
        for to in modes {
            let mut world = World::new(&[("mode", from)], &[("10-a.conf", SINGLE)]);
            world.settle();
            world.desired = DesiredChain::new(&config(&[("mode", to)]));
            world.settle();
            let mut fresh = World::new(&[("mode", to)], &[("10-a.conf", SINGLE)]);
            fresh.settle();
            assert_eq!(world.files, fresh.files, "{from} to {to}");
            world.leave(Restore::Everything);
            expect(&world, &[("10-a.conf", SINGLE)]);
        }
    }
}

#[test]
fn istio_cnis_entry_is_removed_and_comes_back_on_handover() {
    for mode in ["owned", "in-place"] {
        let mut world = World::new(&[("mode", mode)], &[("10-a.conflist", WITH_ISTIO_CNI)]);
        world.settle();
        let directory = world.directory();
        let (first, list) = world.desired.first_network(&directory.files).unwrap();
        assert!(list.plugin(ISTIO_CNI).is_none(), "{}", first.name);
        world.leave(Restore::WithIstioCni);
        expect(&world, &[("10-a.conflist", WITH_ISTIO_CNI)]);
    }
}

#[test]
fn istio_cnis_entry_comes_back_into_a_rewritten_primary() {
    for is_followed in [true, false] {
        let files = [("10-a.conflist", WITH_ISTIO_CNI)];
        let mut world = World::new(&[("mode", "in-place")], &files);
        world.settle();
        world.put("10-a.conflist", PRIMARY);
        if is_followed {
            world.settle();
        }
        world.leave(Restore::WithIstioCni);
        assert_eq!(world.types("10-a.conflist"), ["calico", "istio-cni"]);
    }
}

#[test]
fn istio_cnis_own_file_is_removed_and_comes_back_on_handover() {
    let files = [
        ("02-istio-cni.conflist", WITH_ISTIO_CNI),
        ("10-a.conflist", PRIMARY),
    ];
    for mode in ["owned", "in-place"] {
        let mut world = World::new(&[("mode", mode)], &files);
        world.settle();
        assert!(!world.files.contains_key("02-istio-cni.conflist"));
        assert_eq!(world.settle(), 0);
        world.leave(Restore::WithIstioCni);
        expect(&world, &files);
    }
}

#[test]
fn an_istio_cni_that_is_gone_is_not_restored_on_uninstall() {
    let mut world = World::new(
        &[("mode", "in-place")],
        &[("10-a.conflist", WITH_ISTIO_CNI)],
    );
    world.settle();
    world.leave(Restore::ExceptIstioCni);
    assert_eq!(world.types("10-a.conflist"), ["calico"]);
}

#[test]
fn the_own_file_of_an_istio_cni_that_is_gone_does_not_come_back() {
    let own = ("02-istio-cni.conflist", WITH_ISTIO_CNI);
    for mode in ["owned", "in-place", "standalone"] {
        let mut world = World::new(&[("mode", mode)], &[own, ("10-a.conflist", PRIMARY)]);
        world.settle();
        world.leave(Restore::ExceptIstioCni);
        expect(&world, &[("10-a.conflist", PRIMARY)]);
    }
}

#[test]
fn without_a_record_our_entry_is_found_and_taken_out() {
    for mode in ["owned", "in-place"] {
        let mut world = World::new(&[("mode", mode)], &[("10-a.conflist", PRIMARY)]);
        world.settle();
        world.record = Record::default();
        world.settle();
        world.record = Record::default();
        world.leave(Restore::Everything);
        assert_eq!(world.files.len(), 1);
        assert_eq!(world.types("10-a.conflist"), ["calico"]);
    }
}

#[test]
fn standalone_changes_no_other_file_but_istio_cnis() {
    let istio_conf = r#"{"cniVersion":"0.3.1","name":"istio-cni","type":"istio-cni"}"#;
    let mut world = World::new(
        &[("mode", "standalone")],
        &[("istio-cni.conf", istio_conf), ("10-a.conflist", PRIMARY)],
    );
    world.settle();
    assert_eq!(
        world.files.keys().collect::<Vec<_>>(),
        ["10-a.conflist", "inpod.conflist"]
    );
    world.leave(Restore::WithIstioCni);
    expect(
        &world,
        &[("istio-cni.conf", istio_conf), ("10-a.conflist", PRIMARY)],
    );
}

#[test]
fn a_primary_that_is_named_is_taken_whatever_comes_first_in_its_form() {
    let mut world = World::new(
        &[("mode", "in-place"), ("primary_file", "20-b.conf")],
        &[("10-a.conflist", PRIMARY), ("20-b.conflist", PRIMARY)],
    );
    let plan = world
        .desired
        .plan(&world.directory(), &world.record)
        .unwrap();
    world.apply(&plan);
    assert_eq!(world.types("20-b.conflist"), ["calico", "inpod-cni"]);
    let error = world
        .desired
        .check_effective(&world.directory())
        .unwrap_err();
    assert_eq!(error, PlanError::NotEffective("10-a.conflist".to_owned()));
    assert_eq!(directory(&[]).files.len(), 0);
}

const MULTUS: &str =
    r#"{"cniVersion":"0.3.1","name":"multus","type":"multus","delegates":[DELEGATE]}"#;
const SHIM: &str = r#"{"cniVersion":"0.3.1","name":"multus","type":"multus-shim","clusterNetwork":"/host/etc/cni/net.d/DELEGATE"}"#;

impl World {
    fn put(&mut self, name: &str, text: &str) {
        self.files.insert(name.to_owned(), text.to_owned());
    }

    fn problem(&self) -> PlanError {
        let planned = self.desired.plan(&self.directory(), &self.record);
        planned.expect_err("the files are left alone")
    }

    /// Plans once, and returns why runtimes do not call inpod then.
    fn ineffective(&mut self) -> PlanError {
        let plan = self.desired.plan(&self.directory(), &self.record).unwrap();
        self.apply(&plan);
        self.desired.check_effective(&self.directory()).unwrap_err()
    }
}

#[test]
fn an_invalid_file_before_the_primary_keeps_the_last_copy() {
    for (broken, part) in [
        ("", "EOF"),
        ("{", "EOF"),
        (&PRIMARY[..40], "EOF"),
        ("\u{feff}{}", "byte order mark"),
        (r#"{"name":"n","plugins":[]}"#, "at least one plugin"),
        (r#"{"cniVersion":"1.1.0","name":"n"}"#, "no `plugins`"),
    ] {
        for mode in ["owned", "in-place"] {
            for name in ["05-new.conflist", "10-a.conflist"] {
                let files = [("10-a.conflist", PRIMARY), ("20-b.conflist", PRIMARY)];
                let mut world = World::new(&[("mode", mode)], &files);
                world.settle();
                world.put(name, broken);
                let problem = world.problem().to_string();
                assert!(
                    problem.contains(name) && problem.contains(part),
                    "{problem}"
                );
                // Without an earlier copy, the file of another network is not joined either.
                let fresh = World::new(&[("mode", mode)], &[(name, broken), files[1]]);
                assert!(matches!(fresh.problem(), PlanError::Invalid { .. }));
            }
        }
    }
    let settings = [("primary_file", "20-b.conflist")];
    let files = [("10-a.conflist", "{"), ("20-b.conflist", PRIMARY)];
    World::new(&settings, &files).settle();
    World::new(&[], &[("10-a.conflist", PRIMARY), ("20-b.conflist", "{")]).settle();
}

#[test]
fn a_list_in_a_version_that_the_plugin_does_not_speak_is_left_alone() {
    for (member, problem) in [
        (r#""cniVersion":"1.2.0","#, "1.2.0"),
        (r#""cniVersion":"1.0","#, "1.0"),
    ] {
        let text = format!(r#"{{{member}"name":"n","plugins":[{{"type":"bridge"}}]}}"#);
        for mode in ["owned", "in-place"] {
            let world = World::new(&[("mode", mode)], &[("10-a.conflist", &text)]);
            let expected = PlanError::Version {
                file: "10-a.conflist".to_owned(),
                version: problem.to_owned(),
                spoken: world.desired.spoken.clone(),
            };
            assert_eq!(world.problem(), expected);
        }
    }
    // Today's libcni would select 1.1.0, and a later one 1.2.0.
    let text = r#"{"name":"n","cniVersion":"1.0.0","cniVersions":["1.1.0","1.2.0"],"plugins":[{"type":"bridge"}]}"#;
    for (mode, file) in [
        ("owned", "02-inpod.conflist"),
        ("in-place", "10-a.conflist"),
    ] {
        let mut world = World::new(&[("mode", mode)], &[("10-a.conflist", text)]);
        world.settle();
        let written = &world.files[file];
        assert!(written.contains(r#""cniVersions": ["1.1.0"]"#), "{written}");
        world.leave(Restore::Everything);
        expect(&world, &[("10-a.conflist", text)]);
    }
    let text = r#"{"name":"n","plugins":[{"type":"bridge"}]}"#;
    let mut world = World::new(&[], &[("10-a.conflist", text)]);
    world.desired.spoken = vec!["1.0.0".to_owned()];
    assert!(matches!(world.problem(), PlanError::Version { .. }));
    world.desired.spoken.push("0.1.0".to_owned());
    world.settle();
}

#[test]
fn a_copy_is_refused_where_pods_have_several_networks() {
    for networks in [0, 2] {
        let mut world = World::new(&[], &[("10-a.conflist", PRIMARY)]);
        world.desired.runtime.networks = networks;
        assert!(world.problem().to_string().contains("set mode=in-place"));
        let runtime = world.desired.runtime.clone();
        let mut world = World::new(&[("mode", "in-place")], &[("10-a.conflist", PRIMARY)]);
        world.desired.runtime = runtime;
        world.settle();
    }
}

#[test]
fn the_network_that_crio_selects_by_name_is_joined() {
    let other = PRIMARY.replace("k8s", "pods");
    let mut world = World::new(
        &[],
        &[("10-a.conflist", PRIMARY), ("20-b.conflist", &other)],
    );
    world.desired.runtime.network = Some("pods".to_owned());
    world.settle();
    assert!(world.files["02-inpod.conflist"].contains("pods"));
}

#[test]
fn a_link_is_copied_and_never_replaced() {
    for (mode, is_refused) in [("owned", false), ("in-place", true)] {
        let world = World::new(&[("mode", mode)], &[("10-a.conflist", PRIMARY)]);
        let mut directory = world.directory();
        directory.files[0].is_link = true;
        let planned = world.desired.plan(&directory, &world.record);
        assert_eq!(
            planned == Err(PlanError::Link("10-a.conflist".to_owned())),
            is_refused
        );
    }
}

#[test]
fn the_network_that_multus_holds_inline_is_joined_and_left() {
    let multus = |delegate: &str| MULTUS.replace("DELEGATE", delegate);
    let primary = PRIMARY.replace("1e40", "1");
    let files = [
        ("00-multus.conf", multus(&primary)),
        ("10-a.conflist", primary.clone()),
    ];
    let mut world = World::new(
        &[],
        &files.each_ref().map(|(name, text)| (*name, text.as_str())),
    );
    let problem = world.ineffective();
    assert!(
        matches!(&problem, PlanError::NotCalled { wanted, .. } if wanted == "02-inpod.conflist"),
        "{problem}"
    );
    assert_eq!(world.types("02-inpod.conflist"), ["calico", "inpod-cni"]);
    // Multus generates its file from the copy, which sorts before the primary's file.
    world.put(
        "00-multus.conf",
        &multus(&world.files["02-inpod.conflist"].clone()),
    );
    assert_eq!(world.settle(), 0);
    let twice = format!("{0},{0}", world.files["02-inpod.conflist"]);
    let generated = world.files["00-multus.conf"].clone();
    world.put("00-multus.conf", &multus(&twice));
    assert!(matches!(
        world.ineffective(),
        PlanError::CalledTwice { calls: 2, .. }
    ));
    world.put("00-multus.conf", &generated);
    world.leave(Restore::Everything);
    assert_eq!(world.files.len(), 2);
    let left: serde_json::Value = serde_json::from_str(&world.files["00-multus.conf"]).unwrap();
    assert_eq!(
        left,
        serde_json::from_str::<serde_json::Value>(&multus(&primary)).unwrap()
    );
}

#[test]
fn the_file_that_multus_names_is_joined_and_left() {
    let shim = |file: &str| SHIM.replace("DELEGATE", file);
    let files = [
        ("00-multus.conf", &*shim("10-a.conflist")),
        ("10-a.conflist", PRIMARY),
    ];
    let mut world = World::new(&[], &files);
    assert!(matches!(world.ineffective(), PlanError::NotCalled { .. }));
    world.put("00-multus.conf", &shim("02-inpod.conflist"));
    assert_eq!(world.settle(), 0);
    // Multus would call a file that another mode removes.
    for mode in ["standalone", "in-place"] {
        let mut world = World {
            desired: DesiredChain::new(&config(&[("mode", mode)])),
            files: world.files.clone(),
            record: world.record.clone(),
        };
        world.settle();
        let multus = world.files.iter().find(|(name, _)| name.contains("multus"));
        assert!(
            multus.unwrap().1.contains("/10-a.conflist"),
            "{:?}",
            world.files
        );
    }
    world.leave(Restore::Everything);
    let multus: serde_json::Value = serde_json::from_str(&world.files["00-multus.conf"]).unwrap();
    assert_eq!(
        multus,
        serde_json::from_str::<serde_json::Value>(files[0].1).unwrap()
    );
    // With a named primary, the entry is in the file that Multus calls.
    let settings = [("mode", "in-place"), ("primary_file", "10-a.conflist")];
    World::new(&settings, &files).settle();
}

#[test]
fn a_meta_plugin_is_never_copied() {
    // An unknown plugin is a meta plugin by what it calls.
    for plugin in [
        r#""type":"multus""#,
        r#""type":"multus-cni""#,
        r#""type":"danm""#,
        r#""type":"genie""#,
        r#""type":"unknown","delegates":[]"#,
    ] {
        let meta = format!(r#"{{"name":"m","cniVersion":"0.3.1",{plugin}}}"#);
        let world = World::new(&[], &[("00-meta.conf", &meta)]);
        assert!(matches!(world.problem(), PlanError::OnlyMeta { .. }));
        let files = [("00-meta.conf", meta.as_str()), ("10-a.conflist", PRIMARY)];
        let world = World::new(&[("owned_file", "00-inpod.conflist")], &files);
        assert!(matches!(world.problem(), PlanError::SortsBefore { .. }));
        let mut world = World::new(&[], &files);
        assert!(matches!(world.ineffective(), PlanError::NotCalled { .. }));
        assert_eq!(world.types("02-inpod.conflist"), ["calico", "inpod-cni"]);
        let mut world = World::new(&[("mode", "in-place")], &files);
        world.settle();
        world.leave(Restore::Everything);
        expect(&world, &files);
    }
    // Behind the primary, no runtime calls the meta plugin.
    World::new(
        &[],
        &[("10-a.conflist", PRIMARY), ("99-multus.conf", MULTUS)],
    )
    .settle();
}

const NEWER: &str = r#"{"name":"newer","cniVersion":"1.0.0","plugins":[{"type":"ptp"}]}"#;

impl World {
    fn in_place(files: &[(&str, &str)]) -> Self {
        let mut world = Self::new(&[("mode", "in-place")], files);
        world.settle();
        world
    }

    /// Returns why inpod cannot leave.
    fn stuck(&self) -> PlanError {
        let removal = self
            .desired
            .removal(&self.directory(), &self.record, Restore::Everything);
        removal.expect_err("inpod's entry would stay")
    }
}

#[test]
fn an_uninstall_that_would_leave_the_entry_is_refused() {
    let mut world = World::in_place(&[("10-a.conflist", PRIMARY)]);
    let edited = world.files["10-a.conflist"].clone();
    world.put("10-a.conflist", &edited.replace("\"k8s\",", "\"k8s\",,"));
    assert!(matches!(world.stuck(), PlanError::Invalid { .. }));
    world.put("10-a.conflist", &edited);
    let mut directory = world.directory();
    directory.files[0].is_link = true;
    let removal = world
        .desired
        .removal(&directory, &world.record, Restore::Everything);
    assert_eq!(removal, Err(PlanError::Link("10-a.conflist".to_owned())));
    world.leave(Restore::Everything);
    expect(&world, &[("10-a.conflist", PRIMARY)]);
}

#[test]
fn a_single_configuration_stays_away_once_its_owner_has_moved_on() {
    // The owner now writes a list of the same name itself.
    let mut world = World::in_place(&[("10-a.conf", SINGLE)]);
    world.put("10-a.conflist", NEWER);
    world.settle();
    world.leave(Restore::Everything);
    expect(&world, &[("10-a.conflist", NEWER)]);
    // The owner has removed the network, and another one is used.
    let mut world = World::in_place(&[("10-a.conf", SINGLE), ("20-b.conflist", PRIMARY)]);
    world.files.remove("10-a.conflist");
    world.settle();
    assert_eq!(world.types("20-b.conflist"), ["calico", "inpod-cni"]);
    world.leave(Restore::Everything);
    expect(&world, &[("20-b.conflist", PRIMARY)]);
    // inpod would have to replace a list of another owner.
    let files = [("10-a.conf", SINGLE), ("10-a.conflist", NEWER)];
    let world = World::new(&[("mode", "in-place")], &files);
    assert!(matches!(world.problem(), PlanError::Twofold { .. }));
}

#[test]
fn multus_gets_back_the_network_that_was_copied() {
    let shim = |file: &str| SHIM.replace("DELEGATE", file);
    let joined = shim("02-inpod.conflist");
    let other = [
        ("00-multus.conf", joined.as_str()),
        ("20-b.conflist", NEWER),
    ];
    for (settings, primary) in [
        (&[][..], "10-a.conflist"),
        (&[("primary_file", "30-c.conflist")], "30-c.conflist"),
    ] {
        let mut files = other.to_vec();
        files.push((primary, PRIMARY));
        let mut world = World::new(settings, &files);
        world.settle();
        // Half a file does not make another network the node's.
        world.put(primary, &PRIMARY[..40]);
        world.leave(Restore::Everything);
        assert!(
            world.files["00-multus.conf"].contains(primary),
            "{:?}",
            world.files
        );
    }
    let mut world = World::new(
        &[],
        &[("00-multus.conf", &joined), ("10-a.conflist", PRIMARY)],
    );
    world.settle();
    world.record.joined = None;
    world.files.remove("10-a.conflist");
    assert!(matches!(world.stuck(), PlanError::StillCalled { .. }));
}

#[test]
fn only_the_calls_that_multus_makes_count() {
    let entry = World::in_place(&[("10-a.conflist", PRIMARY)]).files["10-a.conflist"].clone();
    let copy = ("02-inpod.conflist", entry.as_str());
    for (multus, is_called) in [
        (SHIM.replace("DELEGATE", "02-inpod.conflist"), true),
        (
            SHIM.replace(
                "/host/etc/cni/net.d/DELEGATE",
                "/etc/cni/multus/net.d/02-inpod.conflist",
            ),
            false,
        ),
        (
            SHIM.replace(
                "DELEGATE\"",
                &format!("10-a.conflist\",\"delegates\":[{entry}]"),
            ),
            false,
        ),
    ] {
        let files = [
            ("00-multus.conf", multus.as_str()),
            copy,
            ("10-a.conflist", PRIMARY),
        ];
        let world = World::new(&[], &files);
        let found = world.desired.check_effective(&world.directory());
        assert_eq!(found.is_ok(), is_called, "{multus}: {found:?}");
    }
    let multus = SHIM.replace("DELEGATE", "02-inpod.conflist");
    let pair = format!(
        r#"{{"name":"m","cniVersion":"0.3.1","plugins":[{multus},{{"type":"inpod-cni"}}]}}"#
    );
    let world = World::new(&[], &[("00-multus.conflist", &pair), copy]);
    let found = world.desired.check_effective(&world.directory());
    assert!(
        matches!(found, Err(PlanError::CalledTwice { calls: 2, .. })),
        "{found:?}"
    );
}

#[test]
fn the_file_of_another_owner_is_never_replaced() {
    let files = [("10-a.conflist", PRIMARY), ("20-b.conflist", NEWER)];
    let world = World::new(&[("owned_file", "10-a.conflist")], &files);
    assert_eq!(
        world.problem(),
        PlanError::Foreign("10-a.conflist".to_owned())
    );
    // Behind one meta plugin stands another.
    let danm = r#"{"name":"d","cniVersion":"0.3.1","type":"danm"}"#;
    let multus = MULTUS.replace("DELEGATE", "");
    let metas = [("00-multus.conf", multus.as_str()), ("05-danm.conf", danm)];
    assert!(matches!(
        World::new(&[], &metas).problem(),
        PlanError::OnlyMeta { .. }
    ));
    let named = World::new(&[("primary_file", "05-danm.conf")], &metas);
    assert!(matches!(named.problem(), PlanError::OnlyMeta { .. }));
}

#[test]
fn a_list_that_would_grow_beyond_what_runtimes_read_is_left_alone() {
    let text = NEWER.replace("newer", &"n".repeat((2 << 20) - 100));
    for mode in ["owned", "in-place"] {
        let world = World::new(&[("mode", mode)], &[("10-a.conflist", &text)]);
        let why = Malformed::TooLarge;
        let file = "10-a.conflist".to_owned();
        assert_eq!(world.problem(), PlanError::Invalid { file, why });
    }
}
