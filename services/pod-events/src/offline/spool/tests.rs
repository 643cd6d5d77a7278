use std::os::unix::fs::symlink;

use inpod_cni::{
    args::NamedPod,
    spool::{Cause, SPOOL_DIR},
};
use inpod_types::NetnsRef;

use super::*;
use crate::testing::sandbox;

const BOOT: &str = "this-boot";

/// A handler that settles events according to the container's ID.
#[derive(Default)]
struct Recorder {
    directory: PathBuf,
    events: Vec<String>,
    /// The number of files left at each event.
    left: Vec<usize>,
}

impl EventHandler for Recorder {
    async fn handle(&mut self, event: Event) -> ReplayOutcome {
        let id = event.sandbox().container_id.to_string();
        self.events.push(format!("{id} {}", event.name()));
        self.left.push(names(&self.directory).len());
        match id.as_str() {
            "late" => ReplayOutcome::Retry("not yet".to_owned()),
            "hidden" if matches!(event, Event::Admitted(..)) => {
                ReplayOutcome::Retry("not shown".to_owned())
            }
            "odd" => ReplayOutcome::Dropped("no such pod".to_owned()),
            _ => ReplayOutcome::Done,
        }
    }
}

fn entry(verb: SpooledVerb, container_id: &str, time_unix_ms: u64) -> Entry {
    Entry {
        time_unix_ms,
        boot_id: BOOT.to_owned(),
        pod: Some(NamedPod {
            namespace: "shop".parse().unwrap(),
            name: "web".parse().unwrap(),
            uid: Some("1111".parse().unwrap()),
        }),
        netns: Some(NetnsRef {
            device: Some(4),
            inode: Some(7),
            ..NetnsRef::from_path("/run/netns/a")
        }),
        ..Entry::new(verb, Cause::AgentAway, sandbox(container_id))
    }
}

fn names(directory: &Path) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(directory)
        .unwrap()
        .map(|file| file.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

struct Fixture {
    state_dir: tempfile::TempDir,
    recorder: Recorder,
}

impl Fixture {
    fn new(entries: &[Entry]) -> Self {
        let state_dir = tempfile::tempdir().unwrap();
        let directory = state_dir.path().join(SPOOL_DIR);
        fs::create_dir(&directory).unwrap();
        for entry in entries {
            entry.write(state_dir.path()).unwrap();
        }
        let recorder = Recorder {
            directory,
            ..Recorder::default()
        };
        Self {
            state_dir,
            recorder,
        }
    }

    fn directory(&self) -> PathBuf {
        self.state_dir.path().join(SPOOL_DIR)
    }

    async fn replay(&mut self) -> Result<(), String> {
        replay(&self.directory(), BOOT, &mut self.recorder).await
    }
}

#[tokio::test]
async fn events_are_replayed_in_the_order_of_their_writing() {
    let mut fixture = Fixture::new(&[
        entry(SpooledVerb::Del, "a", 900),
        entry(SpooledVerb::Add, "b", 10_000),
        entry(SpooledVerb::Add, "a", 50),
    ]);
    fixture.replay().await.unwrap();
    assert_eq!(
        fixture.recorder.events,
        ["a admitted", "a ended", "b admitted"]
    );
}

#[tokio::test]
async fn a_file_goes_after_its_effect_and_before_the_next_one() {
    let mut fixture = Fixture::new(&[
        entry(SpooledVerb::Del, "a", 1),
        entry(SpooledVerb::Del, "odd", 2),
        entry(SpooledVerb::Del, "b", 3),
    ]);
    fixture.replay().await.unwrap();
    assert_eq!(fixture.recorder.left, [3, 2, 1]);
    assert!(names(&fixture.directory()).is_empty());
}

#[tokio::test]
async fn what_must_wait_stays_and_holds_up_its_own_sandbox_alone() {
    let mut fixture = Fixture::new(&[
        entry(SpooledVerb::Del, "late", 1),
        entry(SpooledVerb::Add, "late", 2),
        entry(SpooledVerb::Del, "late", 3),
        entry(SpooledVerb::Del, "a", 4),
    ]);
    fixture.replay().await.unwrap();
    assert_eq!(fixture.recorder.events, ["late ended", "a ended"]);
    assert_eq!(names(&fixture.directory()).len(), 3);
}

#[tokio::test]
async fn an_admission_that_waits_goes_with_the_end_of_its_sandbox() {
    let mut fixture = Fixture::new(&[
        entry(SpooledVerb::Add, "hidden", 1),
        entry(SpooledVerb::Del, "a", 2),
        entry(SpooledVerb::Del, "hidden", 3),
        entry(SpooledVerb::Add, "hidden", 4),
    ]);
    fixture.replay().await.unwrap();
    let recorder = [
        "hidden admitted",
        "a ended",
        "hidden ended",
        "hidden admitted",
    ];
    assert_eq!(fixture.recorder.events, recorder);
    let left = names(&fixture.directory());
    assert!(
        left.len() == 1 && left[0].starts_with("0000000000000004-"),
        "{left:?}"
    );
}

#[tokio::test]
async fn an_admission_waits_on_with_an_end_that_has_to_wait() {
    let mut fixture = Fixture::new(&[
        entry(SpooledVerb::Add, "late", 1),
        entry(SpooledVerb::Del, "late", 2),
    ]);
    fixture.replay().await.unwrap();
    assert_eq!(fixture.recorder.events, ["late admitted", "late ended"]);
    assert_eq!(names(&fixture.directory()).len(), 2);
}

#[tokio::test]
async fn events_of_another_boot_are_dropped_without_being_replayed() {
    let other_boot = Entry {
        boot_id: "an-earlier-boot".to_owned(),
        ..entry(SpooledVerb::Add, "a", 1)
    };
    let mut fixture = Fixture::new(&[other_boot]);
    fixture.replay().await.unwrap();
    assert!(fixture.recorder.events.is_empty() && names(&fixture.directory()).is_empty());
}

#[tokio::test]
async fn what_cannot_be_understood_is_set_aside_once_and_blocks_nothing() {
    let mut fixture = Fixture::new(&[entry(SpooledVerb::Del, "a", 5)]);
    let later = serde_json::to_string(&Entry {
        schema: SCHEMA + 1,
        ..entry(SpooledVerb::Del, "b", 2)
    });
    let nameless = serde_json::to_string(&Entry {
        pod: None,
        ..entry(SpooledVerb::Add, "c", 2)
    });
    let garbage = [
        ("0-json", "{"),
        ("1-schema", &later.unwrap()),
        ("2-nameless", &nameless.unwrap()),
    ];
    for (name, text) in garbage {
        fs::write(fixture.directory().join(name), text).unwrap();
    }
    fs::create_dir(fixture.directory().join("3-directory")).unwrap();
    for _ in 0..2 {
        fixture.replay().await.unwrap();
        assert_eq!(fixture.recorder.events, ["a ended"]);
        let aside = ["0-json", "1-schema", "2-nameless", "3-directory"];
        let aside = aside.map(|name| format!("{name}{UNREADABLE_SUFFIX}"));
        assert_eq!(names(&fixture.directory()), aside);
    }
}

#[tokio::test]
async fn what_is_still_being_written_is_left_to_its_writer_for_a_while() {
    let mut fixture = Fixture::new(&[]);
    let [fresh, old, directory] =
        [".fresh", ".old", ".directory"].map(|name| fixture.directory().join(name));
    for path in [&fresh, &old] {
        fs::write(path, "{").unwrap();
    }
    fs::create_dir(&directory).unwrap();
    for path in [&old, &directory] {
        let file = fs::File::open(path).unwrap();
        file.set_modified(SystemTime::now() - 2 * ABANDONED_AFTER)
            .unwrap();
    }
    fixture.replay().await.unwrap();
    assert!(fresh.exists() && !old.exists());
}

#[tokio::test]
async fn a_spool_that_was_never_written_to_is_empty() {
    let dir = tempfile::tempdir().unwrap();
    let mut recorder = Recorder::default();
    replay(&dir.path().join(SPOOL_DIR), BOOT, &mut recorder)
        .await
        .unwrap();
    assert!(recorder.events.is_empty());
}

#[tokio::test]
async fn a_spool_that_is_a_symlink_is_reported_and_not_replayed() {
    let mut fixture = Fixture::new(&[entry(SpooledVerb::Del, "a", 1)]);
    let target = fixture.state_dir.path().join("target");
    fs::rename(fixture.directory(), &target).unwrap();
    symlink(&target, fixture.directory()).unwrap();
    let problem = format!(
        "{}: it is a symlink; remove it",
        fixture.directory().display()
    );
    assert_eq!(fixture.replay().await, Err(problem.clone()));
    assert_eq!(names(&target).len(), 1);
    // A symlink to a missing directory is no empty spool.
    fs::rename(&target, fixture.state_dir.path().join("moved")).unwrap();
    assert_eq!(fixture.replay().await, Err(problem));
    assert!(fixture.recorder.events.is_empty());
}

#[test]
fn an_admission_carries_what_an_add_would_have() {
    let written = Entry {
        addresses: vec!["10.0.0.2".parse().unwrap()],
        ..entry(SpooledVerb::Add, "a", now_unix_ms())
    };
    let bytes = serde_json::to_vec(&written).unwrap();
    let Event::Admitted(key, admitted) = parse(&bytes, BOOT).unwrap() else {
        panic!("no admission");
    };
    let OfflineAdd { call, at } = *admitted;
    assert_eq!(key, ("shop".parse().unwrap(), "web".parse().unwrap()));
    assert_eq!(call.sandbox, sandbox("a"));
    assert_eq!(call.uid, Some("1111".parse().unwrap()));
    assert_eq!((call.netns.device, call.netns.inode), (Some(4), Some(7)));
    assert_eq!(call.addresses, written.addresses);
    assert!(BootInstant::now().since(at) < Duration::from_secs(60));
}
