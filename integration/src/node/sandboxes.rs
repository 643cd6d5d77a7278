//! Creates pods on a node: manifests, netns, and the CNI calls of a runtime.

use std::{fs, net::Ipv4Addr, path::Path, sync::atomic::Ordering};

use anyhow::{Context as _, ensure};

use super::{NEXT, Node};
use crate::{
    Call, Outcome, Pod, Spec,
    pod::{exec_in, make_netns},
};

impl Node {
    /// Writes the manifest of a pod. Does nothing on a node of a cluster, whose pods are objects of the API server.
    pub fn write_manifest(&self, spec: &Spec) -> anyhow::Result<()> {
        if self.kubeconfig().exists() {
            return Ok(());
        }
        let path = self
            .manifests()
            .join(format!("{}-{}.yaml", spec.namespace, spec.name));
        // The file is renamed into place, as careful tools do.
        fs::write(path.with_extension("tmp"), spec.manifest(&self.name))?;
        Ok(fs::rename(path.with_extension("tmp"), path)?)
    }

    /// Writes a manifest, and creates the sandbox in the state in which the CNI chain calls inpod.
    pub fn sandbox(&self, spec: Spec) -> anyhow::Result<Pod> {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let host = self.next_address.replace(self.next_address.get() + 1);
        let netns = make_netns(&format!("cni-{}-{number}", std::process::id()))?;
        let veth = format!("veth{number}");
        self.write_manifest(&spec)?;
        let pod = Pod {
            spec,
            container_id: format!("{number:064x}"),
            veth,
            v4: (Ipv4Addr::new(10, 77, 0, 0).to_bits() + u32::from(host)).into(),
            v6: [0xfd77, 0, 0, 0, 0, 0, 0, host].into(),
            netns,
        };
        self.plug(&pod)?;
        Ok(pod)
    }

    fn plug(&self, pod: &Pod) -> anyhow::Result<()> {
        let netns = pod
            .path()
            .file_name()
            .and_then(|name| name.to_str())
            .context("a netns has a name")?;
        let (v4, v6) = (format!("{}/16", pod.v4), format!("{}/64", pod.v6));
        for command in [
            &[
                "ip", "link", "add", &pod.veth, "type", "veth", "peer", "name", "eth0", "netns",
                netns,
            ][..],
            &["ip", "link", "set", &pod.veth, "master", "cni0", "up"],
            &["ip", "-n", netns, "addr", "add", &v4, "dev", "eth0"],
            &[
                "ip", "-n", netns, "addr", "add", &v6, "dev", "eth0", "nodad",
            ],
            &["ip", "-n", netns, "link", "set", "eth0", "up"],
            &[
                "ip",
                "-n",
                netns,
                "route",
                "add",
                "default",
                "via",
                "10.77.0.1",
            ],
            &[
                "ip", "-n", netns, "-6", "route", "add", "default", "via", "fd77::1",
            ],
        ] {
            exec_in(self.netns.path(), command)?;
        }
        Ok(())
    }

    pub fn has_veth(&self, pod: &Pod) -> bool {
        exec_in(self.netns.path(), &["ip", "link", "show", &pod.veth]).is_ok()
    }

    pub fn call(&self, verb: fn(&Pod, &Path, &Path) -> Call, pod: &Pod) -> Call {
        verb(
            pod,
            &inpod_service::socket(&self.run_dir(), "pod-events"),
            &self.state_dir(),
        )
    }

    /// Runs an ADD, which must succeed.
    pub fn add(&self, pod: &Pod) -> anyhow::Result<Outcome> {
        let outcome = self.call(Call::add, pod).run()?;
        ensure!(outcome.code == 0, "ADD of {}: {outcome:?}", pod.spec.name);
        Ok(outcome)
    }

    /// Runs both DELs of a runtime, and removes the netns between the two.
    pub fn del(&self, pod: &Pod) -> anyhow::Result<()> {
        let first = self.call(Call::del, pod).run()?;
        ensure!(
            first.code == 0 && first.stdout.is_empty(),
            "DEL of {}: {first:?}",
            pod.spec.name
        );
        pod.unmount()?;
        let second = self.call(Call::del_again, pod).run()?;
        ensure!(
            second.code == 0 && second.stdout.is_empty(),
            "second DEL of {}: {second:?}",
            pod.spec.name
        );
        Ok(())
    }

    pub fn pod(&self, spec: Spec) -> anyhow::Result<Pod> {
        let pod = self.sandbox(spec)?;
        self.add(&pod)?;
        Ok(pod)
    }
}
