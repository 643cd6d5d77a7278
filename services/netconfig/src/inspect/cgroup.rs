/// Returns whether the cgroup path names the container. The id has to stand alone between the runtime's prefixes
/// and suffixes (`cri-containerd-<id>.scope`, `crio-<id>`, `/<id>`).
pub(super) fn names(cgroup: &str, container_id: &str) -> bool {
    if container_id.is_empty() {
        return false;
    }
    let is_edge = |c: Option<char>| c.is_none_or(|c| !c.is_ascii_alphanumeric());
    cgroup.match_indices(container_id).any(|(at, id)| {
        let before = cgroup.get(..at).and_then(|text| text.chars().next_back());
        let after = cgroup.get(at.saturating_add(id.len())..);
        is_edge(before) && is_edge(after.and_then(|text| text.chars().next()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "4d2f0c";

    #[test]
    fn the_paths_of_every_runtime_name_their_container() {
        for path in [
            "0::/kubepods/burstable/pod1/4d2f0c",
            "0::/kubepods.slice/kubepods-pod1.slice/cri-containerd-4d2f0c.scope",
            "0::/kubepods-besteffort-pod1.slice:cri-containerd:4d2f0c",
            "0::/kubepods.slice/kubepods-pod1.slice/crio-4d2f0c.scope/container",
            "12:cpu:/docker/4d2f0c\n0::/docker/4d2f0c\n",
        ] {
            assert!(names(path, ID), "{path}");
        }
    }

    #[test]
    fn a_longer_id_is_another_container() {
        assert!(!names("0::/kubepods/pod1/4d2f0ce", ID));
        assert!(!names("0::/kubepods/pod1/a4d2f0c", ID));
        assert!(!names("0::/kubepods/pod1", ""));
    }
}
