//! Multus' own entrypoint, which writes Multus' CNI file beside the installer.

use std::{
    fs,
    process::{Child, Command, Stdio},
    thread,
    time::Duration,
};

use integration::run;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;

use crate::common::installer_host::{Host, PRIMARY};

struct Multus(Child);

impl Multus {
    /// Starts the entrypoint in its automatic mode, and waits for the file that it writes.
    #[expect(
        clippy::disallowed_methods,
        reason = "integration/test tells where the entrypoint is"
    )]
    fn start(host: &Host) -> Self {
        let program = std::env::var("MULTUS")
            .expect("MULTUS names Multus' entrypoint: run ./integration/test");
        let dir = host.conf_dir().display().to_string();
        let binary = host.path("multus").display().to_string();
        fs::write(&binary, "").unwrap();
        let mut command = Command::new("unshare");
        // The entrypoint reads the token of its service account below /run.
        let account = "/run/secrets/kubernetes.io/serviceaccount";
        let prepare = format!(
            "mount -t tmpfs tmpfs /run && mkdir -p {account} && touch {account}/token {account}/ca.crt && exec \"$0\" \"$@\""
        );
        command.args(["--mount", "sh", "-c", &prepare, &program]);
        command.args([
            format!("--multus-autoconfig-dir={dir}"),
            format!("--cni-conf-dir={dir}"),
            format!("--multus-cni-conf-dir={}", host.path("multus.d").display()),
            format!("--cni-bin-dir={}", host.path("opt/cni/bin").display()),
            format!("--multus-bin-file={binary}"),
            "--cleanup-config-on-exit=true".to_owned(),
        ]);
        command.env("KUBERNETES_SERVICE_HOST", "192.0.2.1");
        command.env("KUBERNETES_SERVICE_PORT", "443");
        let started = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        let multus = Self(started.unwrap());
        host.until("Multus has written its file", |host| {
            first(host)["plugins"][0] == "multus"
        });
        multus
    }
}

impl Drop for Multus {
    /// Ends the entrypoint as the kubelet does; the entrypoint then removes its file.
    fn drop(&mut self) {
        let pid = Pid::from_raw(i32::try_from(self.0.id()).unwrap());
        kill(pid, Signal::SIGTERM).unwrap();
        self.0.wait().unwrap();
    }
}

/// Returns the network that containerd loads.
#[expect(
    clippy::disallowed_methods,
    reason = "integration/test tells where cniload is"
)]
fn first(host: &Host) -> Value {
    let cniload = std::env::var("CNILOAD").expect("CNILOAD names cniload: run ./integration/test");
    let loaded = run(&cniload, &[&host.conf_dir().display().to_string()]).unwrap();
    serde_json::from_str::<Value>(&loaded).unwrap()["networks"][0].take()
}

fn calls(network: &Value) -> usize {
    network.to_string().matches("inpod-cni").count()
}

#[test]
fn multus_calls_inpod_once_through_the_copy_and_not_any_more_after_an_uninstall() {
    // Multus writes a list for CNI 1.0.0 and a single configuration for earlier versions.
    for version in ["1.0.0", "0.3.1"] {
        let primary = PRIMARY.replace("1.0.0", version);
        let mut host = Host::new(&[("10-calico.conflist", &primary)]);
        let multus = Multus::start(&host);
        assert_eq!(calls(&first(&host)), 0);
        host.start_ready(&[]);
        let network = first(&host);
        assert_eq!(
            (calls(&network), &network["plugins"][0]),
            (1, &Value::from("multus"))
        );
        // A change of the primary reaches Multus through the copy, which stays a copy of the primary.
        host.put("10-calico.conflist", &primary.replace("1e40", "12345"));
        host.until("Multus follows the primary", |host| {
            multus_file(host).contains("12345") && host.is_ready()
        });
        let network = first(&host);
        assert_eq!(calls(&network), 1, "{network}");
        assert_eq!(multus_file(&host).matches("\"multus\"").count(), 1);
        host.stop(Signal::SIGTERM);
        assert!(host.run(&["uninstall"]).status.success());
        assert!(!host.installed().exists());
        // Multus compares its files every second.
        for _ in 0..3 {
            let network = first(&host);
            assert_eq!(
                (calls(&network), &network["plugins"][0]),
                (0, &Value::from("multus"))
            );
            thread::sleep(Duration::from_secs(1));
        }
        drop(multus);
        let _multus = Multus::start(&host);
        assert!(multus_file(&host).contains("12345"));
        assert_eq!(calls(&first(&host)), 0);
    }
}

#[test]
fn a_multus_that_does_not_read_the_copy_is_reported() {
    let mut host = Host::new(&[("10-calico.conflist", PRIMARY)]);
    drop(Multus::start(&host));
    let generated = r#"{"cniVersion":"0.3.1","name":"m","type":"multus","delegates":[{"name":"k8s","plugins":[{"type":"calico"}]}]}"#;
    host.put("00-multus.conf", generated);
    host.start(&[]);
    host.until_logged("multus in 00-multus.conf does not call 02-inpod.conflist");
    assert!(!host.is_ready());
    // In place, inpod stands behind Multus in Multus' own file.
    host.stop(Signal::SIGTERM);
    host.start_ready(&["--mode=in-place"]);
    assert_eq!(calls(&first(&host)), 1);
    host.stop(Signal::SIGTERM);
    assert!(host.run(&["uninstall", "--mode=in-place"]).status.success());
    assert_eq!(host.read("00-multus.conf").as_deref(), Some(generated));
}

/// Returns the file that Multus has written.
fn multus_file(host: &Host) -> String {
    let names = ["00-multus.conf", "00-multus.conflist"];
    names
        .iter()
        .find_map(|name| host.read(name))
        .unwrap_or_default()
}
