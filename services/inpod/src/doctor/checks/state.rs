use super::{
    super::{
        check::Check,
        codes::Code,
        facts::{Directory, Facts, Kind, Space},
    },
    openness,
};

/// A checkpoint or a spool entry has a few KiB at most, but entries arrive in bursts.
const MIN_FREE_BYTES: u64 = 16 << 20;
const MIN_FREE_FILES: u64 = 100;

/// The number of entries at which the plugin stops spooling (`inpod_cni::spool`).
pub(crate) const MAX_SPOOLED: usize = 20_000;

pub(super) fn checks(facts: &Facts) -> Vec<Check> {
    let mut checks: Vec<_> = facts.directories.iter().flat_map(check_directory).collect();
    checks.push(match &facts.spool {
        Err(why) => Check::unknown(Code::SpoolWaiting, "", why),
        Ok(count) if *count >= MAX_SPOOLED => Check::problem(
            Code::SpoolFull,
            "",
            format!("{count} of at most {MAX_SPOOLED} calls wait"),
        ),
        Ok(count) => Check::whether(
            *count > 0,
            Code::SpoolWaiting,
            "",
            format!("{count} calls wait"),
        ),
    });
    checks
}

fn check_directory(directory: &Directory) -> Vec<Check> {
    let path = directory.path.as_str();
    let inode = match &directory.inode {
        Err(why) => return vec![Check::unknown(Code::StateOpen, path, why)],
        // A state directory is created on first use.
        Ok(None) => return vec![Check::ok(Code::StateOpen, path, "does not exist yet")],
        Ok(Some(inode)) => *inode,
    };
    let open = openness(inode, Kind::Directory, 0o700);
    let found = open
        .clone()
        .unwrap_or_else(|| format!("{:04o}", inode.mode));
    let mut checks = vec![Check::whether(open.is_some(), Code::StateOpen, path, found)];
    match &directory.space {
        Err(why) => checks.push(Check::unknown(Code::StateSpaceLow, path, why)),
        Ok(space) => checks.extend(room(path, *space)),
    }
    checks
}

fn room(path: &str, space: Space) -> [Check; 2] {
    let Space {
        bytes,
        files,
        all_files,
        is_read_only,
    } = space;
    let mib = bytes >> 20;
    let is_low = bytes < MIN_FREE_BYTES || (all_files > 0 && files < MIN_FREE_FILES);
    let writable = if is_read_only {
        "read-only"
    } else {
        "writable"
    };
    [
        Check::whether(is_read_only, Code::StateReadOnly, path, writable),
        Check::whether(
            is_low,
            Code::StateSpaceLow,
            path,
            format!("{mib} MiB and {files} files left"),
        ),
    ]
}
