use std::collections::BTreeMap;

use crate::{Directory, NetworkFile};

use super::{
    testing::{config, directory},
    *,
};
use crate::steps::{self, Action, Cause};

const PRIMARY: &str = "{ \"name\": \"k8s\", \"cniVersion\": \"1.0.0\",\n  \"plugins\": [ { \"type\": \"calico\", \"n\": 1e400 } ] }\n";
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
        let mut record = plan.updated_record(&self.desired, &directory, &self.record);
        for step in &steps {
            match &step.action {
                Action::Create { content, .. } | Action::Replace { content, .. } => {
                    self.files.insert(
                        step.name.clone(),
                        String::from_utf8(content.clone()).unwrap(),
                    );
                }
                Action::Remove => drop(self.files.remove(&step.name)),
            }
            // Runtimes must find a network after every step.
            assert!(self.directory().first().is_some(), "after {step:?}");
        }
        record.files.retain(|name, _| !plan.forget.contains(name));
        self.record = record;
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
        let plan = removal::plan(&self.directory(), &self.record, &self.desired, restore);
        self.apply(&plan);
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
        list.plugins()
            .map(|plugin| plugin.kind.to_owned())
            .collect()
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
    assert!(copy.starts_with("{ \"name\": \"k8s\", \"cniVersion\": \"1.0.0\",\n  \"plugins\": [ { \"type\": \"calico\", \"n\": 1e400 }, {\""));
    let changed = PRIMARY.replace("1.0.0", "1.1.0").replace("1e400", "1e401");
    world.files.insert("10-a.conflist".to_owned(), changed);
    assert_eq!(world.settle(), 1);
    assert!(
        world.files["02-inpod.conflist"].contains("1e401")
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
    let empty = World::new(&[("mode", "in-place")], &[("10-a.conflist", "{")]);
    assert_eq!(
        empty.desired.plan(&empty.directory(), &empty.record),
        Err(PlanError::NoPrimary)
    );
}

#[test]
fn an_owned_file_that_would_not_be_taken_is_refused_with_the_setting() {
    let world = World::new(&[], &[("00-multus.conf", SINGLE)]);
    let error = world
        .desired
        .plan(&world.directory(), &world.record)
        .unwrap_err();
    assert!(error.to_string().contains("set owned_file"), "{error}");
    let mut world = World::new(
        &[("owned_file", "00-inpod.conflist")],
        &[("00-multus.conf", SINGLE)],
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
    let changed = world.files["10-a.conflist"].replace("1e400", "7");
    world.files.insert("10-a.conflist".to_owned(), changed);
    assert_eq!(world.settle(), 0, "our entry is there");
    world.leave(Restore::Everything);
    expect(&world, &[("10-a.conflist", &PRIMARY.replace("1e400", "7"))]);
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
        let (first, list) = directory.first().unwrap();
        assert!(list.plugin(ISTIO_CNI).is_none(), "{}", first.name);
        world.leave(Restore::WithIstioCni);
        expect(&world, &[("10-a.conflist", WITH_ISTIO_CNI)]);
    }
}

#[test]
fn istio_cnis_entry_comes_back_even_if_the_primary_was_written_anew() {
    let mut world = World::new(
        &[("mode", "in-place")],
        &[("10-a.conflist", WITH_ISTIO_CNI)],
    );
    world.settle();
    world
        .files
        .insert("10-a.conflist".to_owned(), PRIMARY.to_owned());
    world.settle();
    world.leave(Restore::WithIstioCni);
    assert_eq!(world.types("10-a.conflist"), ["calico", "istio-cni"]);
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
        expect(&world, &[("10-a.conflist", PRIMARY)]);
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
