use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Raises the soft limit of open files to the hard limit. The default of 1024 is for users of select(2), of which inpod
/// has none, while broker and netconfig hold a file or more per pod. A failure is only logged, because metrics show
/// processes near the limit.
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

pub(crate) fn max_open_files() -> usize {
    let current = getrlimit(Resource::Nofile).current;
    current
        .and_then(|max| max.try_into().ok())
        .unwrap_or(usize::MAX)
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
