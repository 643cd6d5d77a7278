use std::fs;

use super::*;
use crate::directory::below;

fn host_with(files: &[(&str, &str)]) -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    for (path, text) in files {
        let path = below(root.path(), Path::new(path));
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    root
}

fn find(files: &[(&str, &str)]) -> (Runtime, Vec<(PathBuf, String)>) {
    Runtime::find(host_with(files).path(), None)
}

#[test]
fn every_version_of_containerds_configuration_is_read() {
    for (text, bins) in [
        (
            "[plugins.cri.cni]\nbin_dir = \"/b\"\nconf_dir = \"/c/\"\nmax_conf_num = 2\n[plugins.cri.containerd.runtimes.kata]\ncni_conf_dir = \"/k\"",
            &["/b"][..],
        ),
        (
            "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\".cni]\nbin_dir = \"/b\"\nconf_dir = \"/c\"\nmax_conf_num = 2\n[plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.kata]\ncni_conf_dir = \"/k\"",
            &["/b"],
        ),
        (
            "version = 3\n[plugins]\n  [plugins.'io.containerd.cri.v1.runtime']\n    [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.kata]\n      cni_conf_dir = '/k'\n    [plugins.'io.containerd.cri.v1.runtime'.cni]\n      bin_dirs = ['/b', '/b2']\n      conf_dir = '/c'\n      max_conf_num = 2",
            &["/b", "/b2"],
        ),
    ] {
        let (runtime, unreadable) = find(&[("/etc/containerd/config.toml", text)]);
        let expected = Runtime {
            conf_dir: "/c".into(),
            bin_dirs: bins.iter().map(PathBuf::from).collect(),
            source: Some("/etc/containerd/config.toml".into()),
            networks: 2,
            network: None,
            handlers: [("kata".to_owned(), "/k".into())].into(),
        };
        assert_eq!((runtime, unreadable), (expected, Vec::new()), "{text}");
    }
}

#[test]
fn without_any_configuration_the_defaults_hold() {
    assert_eq!(find(&[]), (Runtime::default(), Vec::new()));
}

#[test]
fn imports_are_followed_in_order() {
    let (runtime, unreadable) = find(&[
        (
            "/etc/containerd/config.toml",
            "imports = [\"conf.d/*.toml\", \"/opt/one.toml\"]\n[plugins.cri.cni]\nconf_dir=\"/a\"\nbin_dir=\"/b\"",
        ),
        (
            "/etc/containerd/conf.d/2.toml",
            "[plugins.cri.cni]\nconf_dir=\"/two\"",
        ),
        (
            "/etc/containerd/conf.d/1.toml",
            "[plugins.cri.cni]\nconf_dir=\"/one\"\nmax_conf_num=0",
        ),
        (
            "/etc/containerd/conf.d/3.conf",
            "[plugins.cri.cni]\nconf_dir=\"/three\"",
        ),
        ("/opt/one.toml", "[plugins.cri.cni]\nbin_dir=\"/last\""),
    ]);
    assert_eq!((runtime.conf_dir, runtime.networks), ("/two".into(), 0));
    assert_eq!(runtime.bin_dirs, [Path::new("/last")]);
    assert!(unreadable.is_empty(), "{unreadable:?}");
}

#[test]
fn imports_of_imports_are_read_and_a_containerd_without_cri_is_none() {
    let (runtime, _) = find(&[
        (
            "/etc/containerd/config.toml",
            "imports = [\"conf.d/*.toml\"]",
        ),
        (
            "/etc/containerd/conf.d/1.toml",
            "imports = [\"/etc/containerd/more.toml\", \"1.toml\"]",
        ),
        (
            "/etc/containerd/more.toml",
            "[plugins.cri.containerd.runtimes.kata]\ncni_conf_dir = \"/k\"",
        ),
    ]);
    assert_eq!(runtime.handlers, [("kata".to_owned(), "/k".into())].into());
    let (runtime, _) = find(&[
        (
            "/etc/containerd/config.toml",
            "disabled_plugins = [\"cri\"]\n[plugins.cri.cni]\nconf_dir = \"/c\"",
        ),
        (
            "/etc/crio/crio.conf",
            "[crio.network]\ncni_default_network = \"b\"",
        ),
    ]);
    assert_eq!(runtime.network.as_deref(), Some("b"));
}

#[test]
fn crio_is_read_with_its_directory_and_an_invalid_file_is_named() {
    let (runtime, unreadable) = find(&[
        (
            "/etc/crio/crio.conf",
            "[crio.network]\nnetwork_dir = \"/a\"\nplugin_dirs = [\"/b\", \"/c\"]\ncni_default_network = \"pods\"",
        ),
        (
            "/etc/crio/crio.conf.d/10-x.conf",
            "[crio.network]\nnetwork_dir = \"/x\"",
        ),
        ("/etc/crio/crio.conf.d/15-y.conf", "[crio.runtime]\n"),
        ("/etc/crio/crio.conf.d/20-y.conf", "[broken"),
        ("/x/10-net.conflist", ""),
    ]);
    let expected = Runtime {
        conf_dir: "/x".into(),
        bin_dirs: vec!["/b".into(), "/c".into()],
        source: Some("/etc/crio/crio.conf.d/10-x.conf".into()),
        network: Some("pods".to_owned()),
        ..Runtime::default()
    };
    assert_eq!(runtime, expected);
    assert_eq!(unreadable.len(), 1);
    assert_eq!(
        unreadable[0].0,
        Path::new("/etc/crio/crio.conf.d/20-y.conf")
    );
}

#[test]
fn the_runtime_whose_directory_exists_or_is_set_counts() {
    let containerd = "[plugins.cri.cni]\nconf_dir=\"/gone\"\nmax_conf_num=3";
    let root = host_with(&[
        (CONTAINERD[0], containerd),
        (
            "/etc/containerd/config.toml",
            "[plugins.cri.cni]\nconf_dir=\"/there\"",
        ),
        ("/there/10-net.conflist", ""),
    ]);
    let found = |conf_dir: Option<&str>| Runtime::find(root.path(), conf_dir.map(Path::new)).0;
    assert_eq!(found(None).conf_dir, Path::new("/there"));
    assert_eq!(found(Some("/gone")).networks, 3);
    assert_eq!(found(Some("/there")).networks, 1);
}
