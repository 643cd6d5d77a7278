//! A netconfig process, told which backend it is to use, on a machine whose programs a test may choose.

use std::{
    path::Path,
    process::{Child, Command},
    time::{Duration, Instant},
};

use inpod_proto::{
    netconfig::v1::{
        AmbientRedirection, ApplyRulesRequest, ApplyRulesResponse, ClaimNetnsRequest,
        ListClaimsRequest, Redirection, VerifyRulesRequest,
        netconfig_service_client::NetconfigServiceClient, redirection::Mode,
    },
    types::v1::NetnsRef,
};
use tonic::{Status, transport::Channel};

use crate::{
    support::{Fresh, sandbox},
    tools::runner,
};

/// A running netconfig. It is killed when it goes out of scope.
pub(crate) struct Netconfig {
    pub(crate) process: Child,
    pub(crate) client: NetconfigServiceClient<Channel>,
}

/// The command that starts one, after mounts that it alone sees.
pub(crate) fn command(run_dir: &Path, mounts: &str) -> Command {
    let mut command = Command::new("unshare");
    let inner = format!("{mounts} exec {} \"$@\"", runner().display());
    command.args(["--mount", "sh", "-ec", &inner, "netconfig"]);
    command
        .env("INPOD_RUN_DIR", run_dir)
        .env("INPOD_PEER", "uid")
        .env("INPOD_PROBE_MATCH", "off")
        .env("INPOD_LOG_LEVEL", "error")
        .env("INPOD_NETNS_ROOTS", "/proc,/run/netns");
    command
}

/// The mount by which a directory takes the place of `/usr/sbin`.
pub(crate) fn programs_in(directory: &Path) -> String {
    format!("mount --bind {} /usr/sbin;", directory.display())
}

impl Netconfig {
    pub(crate) async fn start(run_dir: &Path, backend: &str, mounts: &str) -> Self {
        let process = command(run_dir, mounts)
            .env("INPOD_BACKEND", backend)
            .spawn()
            .unwrap();
        let channel = daemon::channel(&daemon::socket(run_dir, "netconfig"));
        let mut client = NetconfigServiceClient::new(channel);
        let deadline = Instant::now() + Duration::from_secs(20);
        while client.list_claims(ListClaimsRequest {}).await.is_err() {
            assert!(Instant::now() < deadline, "netconfig does not serve");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        Self { process, client }
    }

    pub(crate) async fn claim(&mut self, fresh: &Fresh) {
        let path = fresh.netns.path().to_str().unwrap().to_owned();
        let request = ClaimNetnsRequest {
            sandbox: Some((&sandbox("c1")).into()),
            netns: Some(NetnsRef {
                path,
                ..NetnsRef::default()
            }),
            addresses: vec!["10.9.0.1".to_owned()],
        };
        self.client.claim_netns(request).await.unwrap();
    }

    pub(crate) async fn apply(&mut self) -> Result<ApplyRulesResponse, Status> {
        let request = ApplyRulesRequest {
            sandbox: Some((&sandbox("c1")).into()),
            redirection: ambient(),
            probe_addresses: Vec::new(),
        };
        Ok(self.client.apply_rules(request).await?.into_inner())
    }

    pub(crate) async fn differences(&mut self) -> Vec<String> {
        let request = VerifyRulesRequest {
            sandbox: Some((&sandbox("c1")).into()),
            redirection: ambient(),
        };
        let response = self.client.verify_rules(request).await.unwrap();
        response.into_inner().differences
    }
}

impl Drop for Netconfig {
    fn drop(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

fn ambient() -> Option<Redirection> {
    Some(Redirection {
        mode: Some(Mode::Ambient(AmbientRedirection::default())),
    })
}

/// A netns with the address that [`Netconfig::claim`] expects.
pub(crate) fn pod_netns() -> Fresh {
    let fresh = Fresh::new();
    fresh.ip("link add eth0 type veth peer name peer");
    fresh.ip("addr add 10.9.0.1/24 dev eth0");
    fresh.ip("link set eth0 up");
    fresh
}
