//! Parses `/proc/<pid>/mountinfo` (proc_pid_mountinfo(5)).

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mount {
    /// The mounted part of the file system, which is `net:[4026531840]` for a network namespace.
    pub(crate) root: String,
    pub(crate) point: String,
    pub(crate) is_shared: bool,
    pub(crate) is_slave: bool,
    pub(crate) kind: String,
}

/// Returns the mounts in the order of mounting, and skips invalid lines.
pub(crate) fn parse(text: &str) -> Vec<Mount> {
    text.lines().filter_map(parse_line).collect()
}

fn parse_line(line: &str) -> Option<Mount> {
    let (before, after) = line.split_once(" - ")?;
    let mut fields = before.split(' ').skip(3);
    let (root, point) = (fields.next()?, fields.next()?);
    let has = |name: &str| {
        let mut optional = fields.clone().skip(1);
        optional.any(|field| field.starts_with(name))
    };
    Some(Mount {
        root: unescaped(root),
        point: unescaped(point),
        is_shared: has("shared:"),
        is_slave: has("master:"),
        kind: after.split(' ').next()?.to_owned(),
    })
}

/// Decodes special characters, which the kernel writes as octal numbers.
fn unescaped(text: &str) -> String {
    [
        ("\\040", " "),
        ("\\011", "\t"),
        ("\\012", "\n"),
        ("\\134", "\\"),
    ]
    .iter()
    .fold(text.to_owned(), |text, (code, plain)| {
        text.replace(code, plain)
    })
}

/// Returns the later mounts that already existed earlier: network namespaces come and go, so only lasting mounts can be
/// compared with the mounts of another process.
pub(crate) fn lasting(earlier: &[Mount], later: Vec<Mount>) -> Vec<Mount> {
    let lasts = |mount: &Mount| {
        earlier
            .iter()
            .any(|it| it.point == mount.point && it.root == mount.root)
    };
    later.into_iter().filter(lasts).collect()
}

/// Returns the mount that holds the path: the mount with the longest matching mount point, and the last of several.
pub(crate) fn above<'a>(mounts: &'a [Mount], path: &str) -> Option<&'a Mount> {
    let holds = |mount: &&Mount| {
        let rest = path.strip_prefix(mount.point.as_str());
        mount.point == "/" || rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    };
    let mut found: Option<&Mount> = None;
    for mount in mounts.iter().filter(holds) {
        if found.is_none_or(|known| known.point.len() <= mount.point.len()) {
            found = Some(mount);
        }
    }
    found
}

/// Returns the network namespaces mounted below a directory.
pub(crate) fn netns_below<'a>(
    mounts: &'a [Mount],
    directory: &'a str,
) -> impl Iterator<Item = &'a Mount> {
    mounts.iter().filter(move |mount| {
        let below = mount.point.strip_prefix(directory);
        mount.kind == "nsfs"
            && mount.root.starts_with("net:")
            && below.is_some_and(|rest| rest.starts_with('/'))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
24 22 0:22 / /run rw,nosuid shared:2 master:1 - tmpfs tmpfs rw
30 24 0:22 /netns /run/netns rw - tmpfs tmpfs rw
31 30 0:4 net:[4026532200] /run/netns/cni-1 rw - nsfs nsfs rw
32 22 0:40 / /mnt/a\\040b rw - tmpfs tmpfs rw
nonsense
";

    #[test]
    fn a_mount_is_where_it_is_and_passes_on_what_it_says() {
        let mounts = parse(TEXT);
        assert_eq!(mounts.len(), 5);
        let run = above(&mounts, "/run/inpod").unwrap();
        assert!(run.is_shared && run.is_slave && run.point == "/run");
        let netns = above(&mounts, "/run/netns").unwrap();
        assert_eq!(
            (netns.point.as_str(), netns.is_shared),
            ("/run/netns", false)
        );
        assert_eq!(above(&mounts, "/running").unwrap().point, "/");
        assert_eq!(above(&mounts, "/mnt/a b/c").unwrap().point, "/mnt/a b");
    }

    #[test]
    fn what_came_or_went_meanwhile_is_left_out() {
        let (before, mut now) = (parse(TEXT), parse(TEXT));
        now[3].root = "net:[1]".to_owned();
        assert_eq!(lasting(&before, now.clone()).len(), 4);
        assert_eq!(lasting(&before[..2], now).len(), 2);
    }

    #[test]
    fn netns_are_those_of_the_directory() {
        let mounts = parse(TEXT);
        let found: Vec<_> = netns_below(&mounts, "/run/netns").collect();
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].point, "/run/netns/cni-1");
        assert_eq!(netns_below(&mounts, "/run/net").count(), 0);
    }
}
