use super::*;

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o777
}

#[tokio::test]
async fn a_socket_is_0600_in_a_directory_of_0700() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("netconfig/grpc.sock");
    let _listener = bind(&path).unwrap();
    assert_eq!((mode(&path), mode(path.parent().unwrap())), (0o600, 0o700));
}

#[tokio::test]
async fn a_stale_socket_is_replaced_and_a_served_one_is_not() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let first = bind(&path).unwrap();
    assert!(matches!(bind(&path), Err(BindError::Served(_))));
    drop(first);
    bind(&path).unwrap();
}

fn refused(path: &Path) -> String {
    format!("{:#}", anyhow::Error::from(bind(path).unwrap_err()))
}

#[tokio::test]
async fn a_file_a_directory_or_a_link_in_the_way_is_named_and_kept() {
    let dir = tempfile::tempdir().unwrap();
    let (file, subdir, link) = (
        dir.path().join("f"),
        dir.path().join("d"),
        dir.path().join("l"),
    );
    fs::write(&file, "precious").unwrap();
    fs::create_dir(&subdir).unwrap();
    std::os::unix::fs::symlink("/nowhere", &link).unwrap();
    for path in [&file, &subdir, &link] {
        let error = refused(path);
        let named = error.contains(path.to_str().unwrap()) && error.contains("not a socket");
        assert!(named, "{error}");
        assert!(
            fs::symlink_metadata(path).is_ok(),
            "{} is kept",
            path.display()
        );
    }
    assert_eq!(fs::read_to_string(&file).unwrap(), "precious");
}

#[tokio::test]
async fn a_run_dir_that_is_a_file_or_cannot_be_made_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("inpod");
    fs::write(&file, "").unwrap();
    let error = format!(
        "{:#}",
        anyhow::Error::from(create_private_directory(&file.join("netconfig")).unwrap_err())
    );
    assert!(
        error.contains("inpod/netconfig") && error.contains("Not a directory"),
        "{error}"
    );
    let error = create_private_directory(&file).unwrap_err().to_string();
    assert!(error.contains("not a directory"), "{error}");
    // Not even root can create a directory in procfs.
    let error = create_private_directory(Path::new("/proc/inpod/netconfig"))
        .unwrap_err()
        .to_string();
    assert!(error.contains("/proc/inpod/netconfig"), "{error}");
}

#[tokio::test]
async fn a_link_above_is_followed_and_one_in_place_of_the_directory_is_not() {
    let dir = tempfile::tempdir().unwrap();
    let (real, link) = (dir.path().join("real"), dir.path().join("run"));
    fs::create_dir(&real).unwrap();
    fs::set_permissions(&real, fs::Permissions::from_mode(0o755)).unwrap();
    std::os::unix::fs::symlink(&real, &link).unwrap();
    // The link resembles /var/run, a link to /run.
    create_private_directory(&link.join("inpod")).unwrap();
    assert!(real.join("inpod").is_dir());
    let error = create_private_directory(&link).unwrap_err().to_string();
    assert!(error.contains("symbolic link; remove it"), "{error}");
    assert_eq!(mode(&real), 0o755, "what the link leads to is as it was");
}

#[tokio::test]
async fn of_many_starts_at_once_over_a_stale_socket_one_serves() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    for _ in 0..25 {
        drop(bind(&path).unwrap());
        let starts = (0..8).map(|_| {
            let path = path.clone();
            tokio::task::spawn_blocking(move || bind(&path))
        });
        let results = futures_util::future::join_all(starts.collect::<Vec<_>>()).await;
        let results: Vec<_> = results.into_iter().map(Result::unwrap).collect();
        let winners = results.iter().filter(|result| result.is_ok()).count();
        assert_eq!(winners, 1, "{results:?}");
        let losers = results.iter().filter_map(|result| result.as_ref().err());
        assert!(
            losers
                .into_iter()
                .all(|error| matches!(error, BindError::Served(_)))
        );
        assert!(std::os::unix::net::UnixStream::connect(&path).is_ok());
    }
}

#[tokio::test]
async fn a_directory_of_a_socket_alone_is_closed_to_others_and_a_shared_one_is_left() {
    let dir = tempfile::tempdir().unwrap();
    let own = dir.path().join("ztunnel");
    fs::create_dir(&own).unwrap();
    let socket = own.join("ztunnel.sock");
    fs::write(&socket, "").unwrap();
    for open in [0o755, 0o710, 0o1777] {
        fs::set_permissions(&own, fs::Permissions::from_mode(open)).unwrap();
        restrict_directory(&socket).unwrap();
        assert_eq!(mode(&own), 0o700);
        restrict_directory(&socket).unwrap();
    }
    fs::write(own.join("other"), "").unwrap();
    restrict_directory(&socket).unwrap();
    fs::set_permissions(&own, fs::Permissions::from_mode(0o755)).unwrap();
    restrict_directory(&socket).unwrap();
    assert_eq!(mode(&own), 0o755, "it is shared");
    for open in [0o775, 0o777, 0o1777] {
        fs::set_permissions(&own, fs::Permissions::from_mode(open)).unwrap();
        let error = restrict_directory(&socket).unwrap_err().to_string();
        let wanted = format!("(mode {open:o}), which holds more than the socket; choose one of");
        assert!(error.contains(&wanted), "{error}");
    }
    assert_eq!(mode(&own), 0o777, "it is left as it was");
}

#[test]
fn a_directory_has_one_process_and_is_free_with_its_end() {
    let dir = tempfile::tempdir().unwrap();
    let first = lock_instance(dir.path()).unwrap();
    let began = Instant::now();
    let error = lock_instance(dir.path()).unwrap_err();
    assert!(matches!(error, BindError::Served(_)), "{error}");
    assert!(
        began.elapsed() >= LOCK_TIMEOUT,
        "one that is ending is waited for"
    );
    drop(first);
    drop(lock_instance(dir.path()).unwrap());
}

#[test]
fn one_that_waits_for_a_directory_that_is_emptied_meanwhile_has_it_alone() {
    let dir = tempfile::tempdir().unwrap();
    let first = lock_instance(dir.path()).unwrap();
    thread::scope(|scope| {
        let second = scope.spawn(|| lock_instance(dir.path()).unwrap());
        // The second instance has opened the file that is about to be removed.
        let waits = || {
            let locks = fs::read_to_string("/proc/locks").unwrap();
            let inode = fs::metadata(dir.path().join("lock")).unwrap().ino();
            let fds = fs::read_dir("/proc/self/fd").unwrap().flatten();
            let open = fds.filter_map(|fd| fs::metadata(fd.path()).ok());
            let times = open.filter(|found| found.ino() == inode).count();
            times >= 2 && locks.contains(&format!(":{inode} "))
        };
        let deadline = Instant::now() + LOCK_TIMEOUT;
        while !waits() {
            assert!(Instant::now() < deadline, "nobody waits");
            thread::yield_now();
        }
        clear_directory(dir.path()).unwrap();
        drop(first);
        let second = second.join().unwrap();
        let third = lock_instance(dir.path()).unwrap_err();
        assert!(matches!(third, BindError::Served(_)), "{third}");
        drop(second);
    });
}

#[tokio::test]
async fn a_socket_is_removed_by_the_one_that_served_it_and_another_s_is_not() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("grpc.sock");
    let mine = bind(&path).unwrap();
    remove_socket(&path, SockType::Stream).unwrap();
    assert!(path.exists(), "it is served");
    drop(mine);
    remove_socket(&path, SockType::Stream).unwrap();
    assert!(!path.exists());
    remove_socket(&path, SockType::Stream).unwrap();
}

#[test]
fn a_directory_is_emptied_and_stays() {
    let dir = tempfile::tempdir().unwrap();
    let below = dir.path().join("pods");
    fs::create_dir(&below).unwrap();
    fs::write(below.join("1.json"), "{}").unwrap();
    fs::write(dir.path().join("left"), "uninstall").unwrap();
    let outside = tempfile::tempdir().unwrap();
    fs::write(outside.path().join("kept"), "").unwrap();
    std::os::unix::fs::symlink(outside.path(), dir.path().join("link")).unwrap();
    clear_directory(dir.path()).unwrap();
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    assert!(outside.path().join("kept").exists(), "no link is followed");
    clear_directory(&dir.path().join("absent")).unwrap();
}

#[tokio::test]
async fn a_path_over_107_bytes_is_refused_with_its_length() {
    let error = bind(&Path::new("/tmp").join("x".repeat(200)))
        .unwrap_err()
        .to_string();
    assert!(error.contains("205 bytes"), "{error}");
}
