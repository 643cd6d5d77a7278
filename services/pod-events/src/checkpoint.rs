//! What pod-events remembers of sandboxes: one file each, written before the first effect.
//!
//! The files live on tmpfs and name the boot: what an earlier boot left is of no sandbox that exists.

mod file;
mod intent;

use std::{
    collections::BTreeMap,
    fs, io,
    net::IpAddr,
    path::{Path, PathBuf},
};

use workload::{
    NetnsId, NetnsRef, NetworkName, PodRef, PodUid, Revision, SandboxRef, ServiceAccountName,
};

use crate::{pod::Pod, redirection::Wishes};

pub use intent::Intent;

/// One sandbox, as far as it is known and as far as it has come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// The sandbox.
    pub sandbox: SandboxRef,
    /// The pod it is of.
    pub pod: PodRef,
    /// The pod's service account.
    pub service_account: ServiceAccountName,
    /// What the plugin said of the netns.
    pub netns: NetnsRef,
    /// What netconfig proved of it.
    pub netns_id: Option<NetnsId>,
    /// The pod's addresses in it.
    pub addresses: Vec<IpAddr>,
    /// The order of the last change.
    pub revision: Revision,
    /// How far it has come.
    pub intent: Intent,
    /// What kubelet and runtime call the pod, where that is not its UID.
    pub runtime_uid: Option<PodUid>,
    /// Whether the pod was let through before the source knew it. UID and service account are guesses then: the
    /// runtime's word, or where it said none the container's id; and `default`.
    pub let_through: bool,
    /// What was granted to the pod of what it asks of its redirection, when that was applied last.
    pub wishes: Wishes,
}

impl Record {
    /// Whether it is of a pod that the source shows. A static pod keeps its sandbox when the pod that shows it is made
    /// anew.
    pub fn is_of(&self, pod: &Pod) -> bool {
        let by_hash = self.runtime_uid.is_some() && self.runtime_uid == pod.runtime_uid;
        let unnamed =
            self.let_through && self.pod.uid.as_str() == self.sandbox.container_id.as_str();
        pod.is_called(&self.pod.uid) || by_hash || (unnamed && !pod.terminal)
    }

    /// Whether a verb of the runtime about that sandbox is about this one. One that was found by its processes has no
    /// network, and belongs to whichever network's verb names its container.
    pub fn is_meant_by(&self, sandbox: &SandboxRef) -> bool {
        let own = &self.sandbox;
        let found = own.network_name == NetworkName::default();
        own == sandbox
            || (found && own.container_id == sandbox.container_id && own.ifname == sandbox.ifname)
    }

    /// Whether nobody knows yet where its netns is: it stands for a pod that another agent put into the mesh.
    pub fn is_unfound(&self) -> bool {
        matches!(self.intent, Intent::Inherited) && self.netns_id.is_none()
    }
}

/// Why the checkpoint cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// A file or the directory.
    #[error("cannot {act} checkpoint {}", .path.display())]
    Io {
        /// What was attempted.
        act: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
}

/// The directory of the files.
#[derive(Clone, Debug)]
pub struct Checkpoint {
    directory: PathBuf,
    boot_id: String,
}

impl Checkpoint {
    /// Opens the directory and makes it where it is missing.
    ///
    /// # Errors
    ///
    /// When the directory cannot be made or the boot's id cannot be read.
    pub fn open(directory: &Path) -> Result<Self, CheckpointError> {
        let boot = Path::new("/proc/sys/kernel/random/boot_id");
        let boot_id = fs::read_to_string(boot).map_err(failed("read", boot))?;
        fs::create_dir_all(directory).map_err(failed("make", directory))?;
        Ok(Self {
            directory: directory.to_owned(),
            boot_id: boot_id.trim().to_owned(),
        })
    }

    /// Reads every record of this boot at start, and clears away what is none. What cannot be read is set aside, loudly,
    /// and keeps no pod from its service.
    ///
    /// # Errors
    ///
    /// When the directory cannot be read.
    pub fn load(&self) -> Result<BTreeMap<SandboxRef, Record>, CheckpointError> {
        // A write that a crash cut short: its record was never in force.
        for path in self.files("tmp")? {
            fs::remove_file(&path).map_err(failed("remove", &path))?;
        }
        let mut records = BTreeMap::new();
        for path in self.files("json")? {
            let bytes = fs::read(&path).map_err(failed("read", &path))?;
            match file::parse(&bytes, &self.boot_id) {
                Ok(Some(record)) => {
                    records.insert(record.sandbox.clone(), record);
                }
                Ok(None) => fs::remove_file(&path).map_err(failed("remove", &path))?,
                Err(error) => {
                    tracing::error!(path = %path.display(), %error, "Set an unreadable checkpoint aside");
                    fs::rename(&path, path.with_extension("unreadable"))
                        .map_err(failed("set aside", &path))?;
                }
            }
        }
        Ok(records)
    }

    /// The records as they stand, while they are being written: what every intent says that effects may follow.
    ///
    /// # Errors
    ///
    /// When the directory cannot be read.
    pub fn records(&self) -> Result<Vec<Record>, CheckpointError> {
        let mut records = Vec::new();
        for path in self.files("json")? {
            match fs::read(&path) {
                Ok(bytes) => records.extend(file::parse(&bytes, &self.boot_id).ok().flatten()),
                // Removed meanwhile.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(failed("read", &path)(error)),
            }
        }
        Ok(records)
    }

    fn files(&self, extension: &str) -> Result<Vec<PathBuf>, CheckpointError> {
        let mut files = Vec::new();
        for entry in fs::read_dir(&self.directory).map_err(failed("read", &self.directory))? {
            let path = entry.map_err(failed("read", &self.directory))?.path();
            if path.extension().is_some_and(|found| found == extension) {
                files.push(path);
            }
        }
        Ok(files)
    }

    /// Writes a record, whole or not at all. No fsync: the directory is on tmpfs and outlives no power cut.
    ///
    /// # Errors
    ///
    /// When it cannot be written.
    pub fn write(&self, record: &Record) -> Result<(), CheckpointError> {
        let path = self.path(&record.sandbox);
        let temporary = path.with_extension("tmp");
        fs::write(&temporary, file::render(record, &self.boot_id))
            .map_err(failed("write", &temporary))?;
        fs::rename(&temporary, &path).map_err(failed("write", &path))
    }

    /// Forgets a sandbox; one that is unknown succeeds.
    ///
    /// # Errors
    ///
    /// When the file cannot be removed.
    pub fn remove(&self, sandbox: &SandboxRef) -> Result<(), CheckpointError> {
        let path = self.path(sandbox);
        match fs::remove_file(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other.map_err(failed("remove", &path)),
        }
    }

    /// Long ids are cut: a file name holds 255 bytes. The FNV-1a hash of the whole keeps names apart.
    fn path(&self, sandbox: &SandboxRef) -> PathBuf {
        let name = sandbox.to_string();
        let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
        let readable: String = sandbox.container_id.as_str().chars().take(64).collect();
        self.directory.join(format!("{readable}-{hash:016x}.json"))
    }
}

fn failed<'a>(
    act: &'static str,
    path: &'a Path,
) -> impl Fn(io::Error) -> CheckpointError + use<'a> {
    move |source| CheckpointError::Io {
        act,
        path: path.to_owned(),
        source,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        moment::Moment,
        redirection::Exclusions,
        testing::{pod, record},
    };

    fn checkpoint() -> (tempfile::TempDir, Checkpoint) {
        let dir = tempfile::tempdir().unwrap();
        let checkpoint = Checkpoint::open(&dir.path().join("pods")).unwrap();
        (dir, checkpoint)
    }

    #[test]
    fn what_was_written_is_read_back() {
        let (_dir, checkpoint) = checkpoint();
        let since = Moment::after_boot(std::time::Duration::from_millis(1_234_567));
        let intents = [
            Intent::Out,
            Intent::Enrolling,
            Intent::Inherited,
            Intent::Enrolled {
                fingerprint: "f".into(),
            },
            Intent::Leaving { since },
            Intent::Draining { since },
            Intent::Deleting { since },
        ];
        for intent in intents {
            let record = Record {
                intent,
                ..record("c1")
            };
            checkpoint.write(&record).unwrap();
            assert_eq!(
                checkpoint.load().unwrap().into_values().collect::<Vec<_>>(),
                [record]
            );
        }
    }

    #[test]
    fn what_was_let_through_what_a_runtime_calls_it_and_what_it_asks_for_is_read_back() {
        let (_dir, checkpoint) = checkpoint();
        let record = Record {
            let_through: true,
            runtime_uid: Some("h1".parse().unwrap()),
            wishes: Wishes {
                dns_capture: Some(false),
                bypass_inbound_capture: true,
                virtual_interfaces: vec!["vm0".into()],
                exclusions: Exclusions {
                    outbound_cidrs: ["10.0.0.0/8".parse().unwrap()].into(),
                    ..Exclusions::default()
                },
                keep_existing_connections: true,
            },
            ..record("c1")
        };
        checkpoint.write(&record).unwrap();
        let read: Vec<_> = checkpoint.load().unwrap().into_values().collect();
        assert_eq!(read, [record]);
    }

    #[test]
    fn a_record_is_of_the_pod_of_its_uid_its_hash_or_where_there_was_none_its_name() {
        let of = |uid: &str, hash: Option<&str>| {
            let mut pod = pod("shop", "web");
            pod.pod.uid = uid.parse().unwrap();
            pod.runtime_uid = hash.map(|hash| hash.parse().unwrap());
            pod
        };
        let plain = record("c1");
        assert!(plain.is_of(&of("uid-of-web", None)) && !plain.is_of(&of("another", None)));
        let static_pod = Record {
            runtime_uid: Some("h1".parse().unwrap()),
            ..record("c1")
        };
        assert!(static_pod.is_of(&of("made-anew", Some("h1"))));
        assert!(!static_pod.is_of(&of("made-anew", Some("h2"))));
        let mut unnamed = Record {
            let_through: true,
            ..record("c1")
        };
        assert!(!unnamed.is_of(&of("another", None)));
        unnamed.pod.uid = "c1".parse().unwrap();
        assert!(unnamed.is_of(&of("another", None)));
    }

    #[test]
    fn a_removed_record_is_gone_and_may_be_removed_again() {
        let (_dir, checkpoint) = checkpoint();
        let record = record("c1");
        checkpoint.write(&record).unwrap();
        checkpoint.remove(&record.sandbox).unwrap();
        checkpoint.remove(&record.sandbox).unwrap();
        assert!(checkpoint.load().unwrap().is_empty());
    }

    #[test]
    fn records_of_another_boot_are_dropped() {
        let (_dir, checkpoint) = checkpoint();
        let earlier = Checkpoint {
            boot_id: "an-earlier-boot".into(),
            ..checkpoint.clone()
        };
        earlier.write(&record("c1")).unwrap();
        assert!(checkpoint.load().unwrap().is_empty());
        assert_eq!(fs::read_dir(&checkpoint.directory).unwrap().count(), 0);
    }

    #[test]
    fn an_unreadable_record_is_set_aside_and_the_others_are_read() {
        let (_dir, checkpoint) = checkpoint();
        checkpoint.write(&record("c1")).unwrap();
        fs::write(checkpoint.directory.join("x.json"), "{").unwrap();
        fs::write(checkpoint.directory.join("y.json"), b"\xff\xfe").unwrap();
        assert_eq!(checkpoint.records().unwrap().len(), 1);
        assert_eq!(checkpoint.load().unwrap().len(), 1);
        assert!(checkpoint.directory.join("x.unreadable").exists());
        assert!(checkpoint.directory.join("y.unreadable").exists());
    }

    #[test]
    fn a_write_that_was_cut_short_leaves_the_earlier_record() {
        let (_dir, checkpoint) = checkpoint();
        let record = record("c1");
        checkpoint.write(&record).unwrap();
        fs::write(
            checkpoint.path(&record.sandbox).with_extension("tmp"),
            "{\"sch",
        )
        .unwrap();
        assert_eq!(
            checkpoint.load().unwrap().into_values().collect::<Vec<_>>(),
            [record]
        );
    }

    #[test]
    fn sandboxes_that_differ_in_the_interface_alone_have_files_of_their_own() {
        let (_dir, checkpoint) = checkpoint();
        let one = record("c1");
        let mut two = one.clone();
        two.sandbox.ifname = "net1".parse().unwrap();
        checkpoint.write(&one).unwrap();
        checkpoint.write(&two).unwrap();
        assert_eq!(checkpoint.load().unwrap().len(), 2);
    }
}
