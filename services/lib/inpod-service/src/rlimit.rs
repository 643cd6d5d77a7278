//! How many files the process may have open.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Raises the limit to what whoever started the process allows. Where a runtime does not say, it begins at 1024, for
/// programs that keep descriptors in sets of that size; none is here, and the broker and netconfig hold a file or more
/// for each pod. What cannot be raised stays: who comes near it is told by its metrics.
pub(crate) fn raise_open_files() {
    let known = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: known.maximum,
        ..known
    };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        tracing::warn!(%error, "Cannot raise the limit of open files");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_files_may_be_open_as_whoever_started_the_process_allows() {
        let known = getrlimit(Resource::Nofile);
        let lower = known.maximum.map_or(1 << 20, |most| most - 1);
        let lowered = Rlimit {
            current: Some(lower),
            ..known
        };
        setrlimit(Resource::Nofile, lowered).unwrap();
        assert_eq!(getrlimit(Resource::Nofile).current, Some(lower));
        raise_open_files();
        assert_eq!(getrlimit(Resource::Nofile).current, known.maximum);
    }
}
