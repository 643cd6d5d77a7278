use std::os::unix::fs::symlink;

use tempfile::TempDir;

use super::*;

const POD: &str = "11111111-2222-3333-4444-55555555abcd";
const OTHER: &str = "99999999-2222-3333-4444-55555555abcd";

/// A fake `/proc`. Each netns is a plain file, because the search compares only device and inode.
struct Proc(TempDir);

impl Proc {
    fn new() -> Self {
        let proc = Self(tempfile::tempdir().unwrap());
        proc.process(1, 1, "host", "0::/init.scope\n");
        proc
    }

    fn process(&self, pid: u32, start_time: u64, netns: &str, cgroup: &str) {
        let own = self.0.path().join(pid.to_string());
        let file = self.0.path().join(format!("netns-{netns}"));
        fs::create_dir_all(own.join("ns")).unwrap();
        fs::write(&file, "").unwrap();
        symlink(file, own.join("ns/net")).unwrap();
        fs::write(own.join("cgroup"), cgroup).unwrap();
        let stat =
            format!("{pid} (a) b) S 1 7 7 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 {start_time} 0 0");
        fs::write(own.join("stat"), stat).unwrap();
    }

    fn of_pod(&self, pid: u32, start_time: u64, netns: &str, container: &str) {
        let cgroup = format!("0::/kubepods/burstable/pod{POD}/{container}\n");
        self.process(pid, start_time, netns, &cgroup);
    }

    /// Returns the pids by netns, in the order in which the search tries them.
    fn order(&self) -> Vec<Vec<u32>> {
        let scan = scan(self.0.path(), &POD.parse().unwrap()).unwrap();
        let groups = group_by_netns(scan.members).into_iter();
        let pids = |group: Vec<Member>| group.iter().map(|member| member.process.pid).collect();
        groups.map(pids).collect()
    }
}

#[test]
fn the_oldest_process_of_the_pod_comes_first_whatever_its_pid() {
    let proc = Proc::new();
    proc.of_pod(30, 500, "a", "c1");
    proc.of_pod(4, 900, "a", "c1");
    proc.of_pod(200, 100, "b", "c2");
    proc.of_pod(201, 600, "b", "c2");
    assert_eq!(proc.order(), [vec![200, 201], vec![30, 4]]);
}

#[test]
fn of_processes_that_began_in_the_same_tick_the_smaller_pid_comes_first() {
    let proc = Proc::new();
    proc.of_pod(31, 500, "a", "c1");
    proc.of_pod(30, 500, "b", "c2");
    assert_eq!(proc.order(), [[30], [31]]);
}

#[test]
fn the_nodes_own_netns_is_never_a_pods() {
    let proc = Proc::new();
    proc.of_pod(30, 500, "host", "c1");
    let own = proc.0.path().join("31");
    proc.of_pod(31, 501, "own", "c1");
    fs::remove_file(own.join("ns/net")).unwrap();
    symlink("/proc/self/ns/net", own.join("ns/net")).unwrap();
    assert_eq!(proc.order(), [[0; 0]; 0]);
}

#[test]
fn processes_of_others_and_what_is_no_process_are_left_out() {
    let proc = Proc::new();
    proc.process(30, 500, "a", &format!("0::/kubepods/pod{OTHER}/c1\n"));
    proc.process(31, 500, "b", "0::/system.slice/docker-c1.scope\n");
    fs::create_dir(proc.0.path().join("sys")).unwrap();
    // The directory without files stands for a process that ends during the scan.
    fs::create_dir(proc.0.path().join("32")).unwrap();
    assert_eq!(proc.order(), [[0; 0]; 0]);
}

#[test]
fn a_uid_that_no_cgroup_can_name_finds_nothing() {
    let proc = Proc::new();
    proc.of_pod(30, 500, "a", "c1");
    let error = find(proc.0.path(), &"my-pod".parse().unwrap(), &[]).unwrap_err();
    assert_eq!(error.reason, Reason::NetnsNotFound, "{error}");
}

#[test]
fn what_was_seen_instead_is_told() {
    let rejected = ["the netns holds 10.0.0.9".to_owned()];
    let error = nowhere(&POD.parse().unwrap(), 2, &rejected);
    assert_eq!(
        error.to_string(),
        format!(
            "no process of pod {POD} is in a netns of its own that holds one of the pod's addresses; the netns holds \
             10.0.0.9; 2 of its processes cannot be inspected (CAP_SYS_PTRACE is needed)"
        )
    );
}
