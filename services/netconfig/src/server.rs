//! Serves gRPC. Work in a netns runs in its own tasks, because a disconnecting client cancels its handler, but no
//! change may stop half way.

mod inspect;
mod probe_addresses;
mod wire;
mod work;

use std::{collections::BTreeSet, net::IpAddr, path::PathBuf, pin::Pin, sync::Arc, time::Instant};

use futures_util::Stream;
use inpod_proto::{
    addresses_from, addresses_to,
    netconfig::v1::{
        ApplyRulesRequest, ApplyRulesResponse, ClaimNetnsRequest, ClaimNetnsResponse,
        FindNetnsRequest, FindNetnsResponse, InspectNetnsRequest, InspectNetnsResponse,
        LeaveNodeRequest, LeaveNodeResponse, ListClaimsRequest, ListClaimsResponse,
        ListListenersRequest, ListListenersResponse, PlanRulesRequest, PlanRulesResponse,
        ProbeExemption, ReleaseNetnsRequest, ReleaseNetnsResponse, RemoveRulesRequest,
        RemoveRulesResponse, SelfTestCheck, SelfTestRequest, SelfTestResponse, VerifyRulesRequest,
        VerifyRulesResponse, WatchDriftRequest, WatchDriftResponse,
        netconfig_service_server::NetconfigService,
    },
    required,
};
use inpod_service::{Daemon, Shutdown, peer};
use inpod_types::{NetnsRef, SandboxRef, cgroup::PodKey};
use tonic::{Request, Response, Status};

use crate::{
    apply::{self, Applied, Observation, Planned, Removed, Writer},
    claims::{self, Claim, Claims, validate},
    discover,
    error::{Context as _, Failed},
    metrics::Metrics,
    notifications::Reader,
    preflight::Recheck,
    probes::{self, ProbeSet, ProbeSettings},
    selftest,
    uninstall::UninstallState,
    watch,
};
use wire::{describe, describe_found, phase_of, pod_of, redirection_of, refuse, to_status};
use work::{blocking, detached};

#[derive(Debug)]
pub(crate) struct Handler {
    claims: Arc<Claims>,
    reader: Reader,
    roots: Arc<[PathBuf]>,
    writer: Arc<Writer>,
    probes: ProbeSettings,
    /// Ensures that only one self-test runs at a time.
    self_test: Arc<tokio::sync::Mutex<()>>,
    probe_set: Arc<ProbeSet>,
    recheck: Recheck,
    uninstall: UninstallState,
    instance_id: String,
    shutdown: Shutdown,
    metrics: Metrics,
}

/// The effect of an operation on a netns.
enum Change {
    None,
    /// The operation changed the netns or may have done so, and the state has to be read.
    Unread,
    /// The operation changed the netns and read the state back.
    Read(Observation),
}

type Answer<T> = Result<Response<T>, Status>;

impl Handler {
    pub(crate) fn new(
        reader: Reader,
        roots: Vec<PathBuf>,
        writer: Arc<Writer>,
        probes: ProbeSettings,
        probe_set: Arc<ProbeSet>,
        recheck: Recheck,
        daemon: &Daemon,
    ) -> Self {
        let claims = Arc::clone(reader.claims());
        let metrics = daemon
            .metrics()
            .register(|registry| Metrics::register(registry, &claims, &probe_set));
        Self {
            claims,
            reader,
            roots: roots.into(),
            writer,
            probes,
            self_test: Arc::default(),
            probe_set,
            recheck,
            uninstall: UninstallState::new(daemon),
            instance_id: daemon.instance_id().to_owned(),
            shutdown: daemon.shutdown(),
            metrics,
        }
    }

    /// Runs `work` under the claim's lock, and publishes the state to watchers if `work` changed anything.
    async fn with_change_lock<T: Send + 'static>(
        &self,
        operation: &'static str,
        claim: Arc<Claim>,
        change: impl Fn(&T) -> Change + Send + 'static,
        work: impl FnOnce(&Claim) -> Result<T, Failed> + Send + 'static,
    ) -> Result<T, Status> {
        let (reader, metrics) = (self.reader.clone(), self.metrics.clone());
        detached(async move {
            let _guard = claim.change_lock.lock().await;
            if !reader.claims().is_current(&claim) {
                return Err(to_status(claims::unknown(&claim.sandbox)));
            }
            let began = Instant::now();
            let result = blocking({
                let claim = Arc::clone(&claim);
                move || work(&claim)
            });
            let result = result.await;
            metrics.record(operation, &result, began.elapsed());
            match result.as_ref().map_or(Change::Unread, change) {
                Change::None => {}
                Change::Unread => reader.republish(&claim, None),
                Change::Read(observation) => reader.republish(&claim, Some(observation)),
            }
            result
        })
        .await
    }

    /// Sets the probe addresses of a claimed sandbox whose rules netconfig has not written yet.
    async fn set_probe_addresses(
        &self,
        claim: Arc<Claim>,
        probed: BTreeSet<IpAddr>,
    ) -> Result<(), Status> {
        if !probed.is_empty() {
            self.uninstall.cancel();
        }
        let probe_set = Arc::clone(&self.probe_set);
        let set = self.with_change_lock(
            "probes",
            claim,
            |_| Change::None,
            move |claim| {
                drop(claim.take_prepared_probes());
                let change = probe_set.set_addresses(&claim.sandbox, &probed)?;
                if change.changed {
                    tracing::info!(sandbox = %claim.sandbox, ?probed, "Set probe addresses");
                }
                Ok(())
            },
        );
        self.recheck.observe(set.await)
    }

    fn claim_of(
        &self,
        sandbox: Option<inpod_proto::types::v1::SandboxRef>,
    ) -> Result<Arc<Claim>, Status> {
        let sandbox: SandboxRef = required("sandbox", sandbox).map_err(refuse)?;
        self.claims.get(&sandbox).map_err(to_status)
    }
}

#[tonic::async_trait]
impl NetconfigService for Handler {
    async fn claim_netns(&self, request: Request<ClaimNetnsRequest>) -> Answer<ClaimNetnsResponse> {
        let request = request.into_inner();
        let exemption = request.probe_exemption();
        let sandbox: SandboxRef = required("sandbox", request.sandbox).map_err(refuse)?;
        let wanted: NetnsRef = required("netns", request.netns).map_err(refuse)?;
        let expected = addresses_from(&request.addresses, "addresses").map_err(refuse)?;
        if exemption == ProbeExemption::On {
            probe_addresses::parse(&request.addresses, "addresses").map_err(refuse)?;
        }
        let prepares = exemption == ProbeExemption::Prepare;
        if prepares {
            self.uninstall.cancel();
        }
        let (claims, roots) = (Arc::clone(&self.claims), Arc::clone(&self.roots));
        let sysctls = self.writer.sysctls.clone();
        let claimed = blocking(move || {
            let (validated, visit) =
                validate::validate_visited(&wanted, expected, &roots, &sysctls)?;
            let addresses = validated.addresses.clone();
            let claim = claims.claim(&sandbox, validated)?;
            let (netns, path) = (claim.netns.id(), claim.netns.path().display());
            tracing::info!(%sandbox, %netns, %path, "Claimed");
            // The lock makes a change wait until the state is read.
            let lock = Arc::clone(&claim.change_lock).try_lock_owned();
            Ok((claim, addresses, visit, lock))
        });
        let (claim, addresses, visit, lock) = self.recheck.observe(claimed.await)?;
        if let Ok(lock) = lock {
            // The read starts only after the answer, because the caller meanwhile has ztunnel open its listeners.
            let (reader, claim) = (self.reader.clone(), Arc::clone(&claim));
            let (probe_set, probed) = (Arc::clone(&self.probe_set), addresses.clone());
            drop(tokio::task::spawn_blocking(move || {
                reader.read_visited(&claim, visit);
                if prepares {
                    probe_addresses::prepare(&probe_set, &claim, probed);
                }
                drop(lock);
            }));
        }
        if let Some(probed) = probe_addresses::of_claim(exemption, &addresses) {
            self.set_probe_addresses(Arc::clone(&claim), probed).await?;
        }
        Ok(Response::new(ClaimNetnsResponse {
            instance_id: self.instance_id.clone(),
            netns: Some(claim.netns.id().into()),
            addresses: addresses_to(&addresses),
        }))
    }

    async fn release_netns(
        &self,
        request: Request<ReleaseNetnsRequest>,
    ) -> Answer<ReleaseNetnsResponse> {
        let request = request.into_inner();
        let sandbox: SandboxRef = required("sandbox", request.sandbox).map_err(refuse)?;
        let (claims, probe_set) = (Arc::clone(&self.claims), Arc::clone(&self.probe_set));
        let released = detached(async move {
            let released = release(&claims, &sandbox).await;
            probes::release::release(&probe_set, &claims, sandbox).await;
            Ok(released)
        });
        let released = released.await?;
        Ok(Response::new(ReleaseNetnsResponse {
            instance_id: self.instance_id.clone(),
            released,
        }))
    }

    async fn list_claims(
        &self,
        _request: Request<ListClaimsRequest>,
    ) -> Answer<ListClaimsResponse> {
        let claims = self.claims.list();
        Ok(Response::new(ListClaimsResponse {
            instance_id: self.instance_id.clone(),
            claims: claims.iter().map(|claim| describe(claim)).collect(),
        }))
    }

    async fn apply_rules(&self, request: Request<ApplyRulesRequest>) -> Answer<ApplyRulesResponse> {
        let request = request.into_inner();
        let redirection = redirection_of(request.redirection, &self.probes.sources())?;
        let probed =
            probe_addresses::parse(&request.probe_addresses, "probe_addresses").map_err(refuse)?;
        let requires_listeners = request.require_listeners;
        let claim = self.claim_of(request.sandbox)?;
        self.uninstall.cancel();
        let (writer, probe_set) = (Arc::clone(&self.writer), Arc::clone(&self.probe_set));
        let reader = self.reader.clone();
        let applied = self.with_change_lock("apply", claim, change_of, move |claim| {
            let prepared = reader.take_prepared(claim);
            let (applied, seen) = probe_addresses::apply(&probe_set, claim, &probed, || {
                let (netns, sandbox) = (&claim.netns, &claim.sandbox);
                writer.apply_prepared(netns, prepared, &redirection, requires_listeners, sandbox)
            })?;
            let applied = applied.count_direct_flows(&claim.netns, &redirection, &seen)?;
            let Applied {
                fingerprint,
                changed,
                direct_flows,
            } = applied;
            let sandbox = &claim.sandbox;
            tracing::info!(%sandbox, %fingerprint, changed, direct_flows, "Applied rules");
            Ok((applied, seen))
        });
        let (applied, _) = self.recheck.observe(applied.await)?;
        Ok(Response::new(ApplyRulesResponse {
            instance_id: self.instance_id.clone(),
            fingerprint: applied.fingerprint.to_string(),
            changed: applied.changed,
            direct_flows: applied.direct_flows,
        }))
    }

    async fn plan_rules(&self, request: Request<PlanRulesRequest>) -> Answer<PlanRulesResponse> {
        let request = request.into_inner();
        let redirection = redirection_of(request.redirection, &self.probes.sources())?;
        let claim = self.claim_of(request.sandbox)?;
        let writer = Arc::clone(&self.writer);
        let planned = self.with_change_lock(
            "plan",
            claim,
            |_| Change::None,
            move |claim| writer.preview(&claim.netns, &redirection, &claim.sandbox),
        );
        let Planned {
            verified,
            transaction,
        } = planned.await?;
        Ok(Response::new(PlanRulesResponse {
            instance_id: self.instance_id.clone(),
            fingerprint: verified.fingerprint.to_string(),
            differences: verified.differences,
            transaction,
        }))
    }

    async fn find_netns(&self, request: Request<FindNetnsRequest>) -> Answer<FindNetnsResponse> {
        let (pod, addresses) = pod_of(&request.into_inner())?;
        let (claims, writer) = (Arc::clone(&self.claims), Arc::clone(&self.writer));
        let found = detached(blocking(move || {
            let found = discover::find_and_claim(&claims, &pod, &addresses);
            // The field of a claim's error is no field of this request.
            let (claim, process) = found.map_err(|failed| failed.at_field(""))?;
            let only_legacy_nat = writer.has_only_legacy_nat(&claim.netns)?;
            Ok((claim, process, only_legacy_nat))
        }));
        let (claim, process, only_legacy_nat) = found.await?;
        Ok(Response::new(FindNetnsResponse {
            instance_id: self.instance_id.clone(),
            only_legacy_nat,
            ..describe_found(&claim, process)
        }))
    }

    async fn list_listeners(
        &self,
        request: Request<ListListenersRequest>,
    ) -> Answer<ListListenersResponse> {
        let (peer, target) = (peer::of_request(&request), request.into_inner().target);
        let target = target.map(inspect::to_inspect_target);
        let list = |netns: &_, _: Option<&_>| inspect::listeners(netns);
        let answer = self.inspect_target(&peer, target, list).await?;
        Ok(Response::new(ListListenersResponse {
            instance_id: self.instance_id.clone(),
            ..answer
        }))
    }

    async fn self_test(&self, _request: Request<SelfTestRequest>) -> Answer<SelfTestResponse> {
        let (writer, probes) = (Arc::clone(&self.writer), self.probes);
        let turn = Arc::clone(&self.self_test);
        let test = detached(async move {
            let _guard = turn.lock().await;
            blocking(move || selftest::run(&writer, &probes)).await
        });
        test.await?;
        Ok(Response::new(SelfTestResponse {
            instance_id: self.instance_id.clone(),
            passed: true,
            checks: vec![SelfTestCheck {
                name: "ADD".to_owned(),
                passed: true,
                evidence: "the rules of a pod were written and read back in a temporary netns"
                    .to_owned(),
            }],
        }))
    }

    async fn leave_node(&self, _request: Request<LeaveNodeRequest>) -> Answer<LeaveNodeResponse> {
        let probe_set = Arc::clone(&self.probe_set);
        let changed = detached(blocking(move || probe_set.clear())).await?;
        self.uninstall.mark_complete();
        Ok(Response::new(LeaveNodeResponse {
            instance_id: self.instance_id.clone(),
            changed,
        }))
    }

    async fn remove_rules(
        &self,
        request: Request<RemoveRulesRequest>,
    ) -> Answer<RemoveRulesResponse> {
        let request = request.into_inner();
        let phase = phase_of(request.phase())?;
        let claim = self.claim_of(request.sandbox)?;
        let operation = match phase {
            apply::Phase::Drain => "drain",
            apply::Phase::Final => "remove",
        };
        let (writer, probe_set) = (Arc::clone(&self.writer), Arc::clone(&self.probe_set));
        let removed = self.with_change_lock(
            operation,
            claim,
            |(_, seen)| Change::Read(Observation::clone(seen)),
            move |claim| {
                drop((claim.take_prepared(), claim.take_prepared_probes()));
                let (removed, seen) =
                    writer.remove_and_observe(&claim.netns, &claim.sandbox, phase)?;
                let Removed { captured_flows } = removed;
                if phase == apply::Phase::Final {
                    let released = probe_set.release(&claim.sandbox);
                    released.context("the rules are removed")?;
                }
                tracing::info!(sandbox = %claim.sandbox, ?phase, captured_flows, "Removed rules");
                Ok((captured_flows, seen))
            },
        );
        let (captured_flows, _) = removed.await?;
        Ok(Response::new(RemoveRulesResponse {
            captured_flows,
            instance_id: self.instance_id.clone(),
        }))
    }

    async fn verify_rules(
        &self,
        request: Request<VerifyRulesRequest>,
    ) -> Answer<VerifyRulesResponse> {
        let request = request.into_inner();
        let redirection = redirection_of(request.redirection, &self.probes.sources())?;
        let claim = self.claim_of(request.sandbox)?;
        let (reader, writer) = (self.reader.clone(), Arc::clone(&self.writer));
        // Without the lock, an apply in progress would look like drift.
        let verified = self.with_change_lock(
            "verify",
            claim,
            |_| Change::None,
            move |claim| {
                let prepared = reader.take_prepared(claim);
                writer.verify_prepared(&claim.netns, prepared, &redirection)
            },
        );
        let verified = verified.await?;
        if !verified.differences.is_empty() {
            self.metrics.record_difference();
        }
        Ok(Response::new(VerifyRulesResponse {
            instance_id: self.instance_id.clone(),
            fingerprint: verified.fingerprint.to_string(),
            differences: verified.differences,
        }))
    }

    async fn inspect_netns(
        &self,
        request: Request<InspectNetnsRequest>,
    ) -> Answer<InspectNetnsResponse> {
        let (peer, request) = (peer::of_request(&request), request.into_inner());
        let writer = Arc::clone(&self.writer);
        let pod = PodKey::from_uid(&request.pod_uid);
        let inspect = move |netns: &_, claim: Option<&_>| {
            if request.findings_only {
                inspect::inspect_findings(netns, claim, pod)
            } else if request.captured_flows_only {
                inspect::inspect_captured_flows(netns)
            } else if request.processes_only {
                inspect::inspect_processes(netns, claim)
            } else {
                inspect::inspect(netns, claim, &writer, pod)
            }
        };
        let answer = self.inspect_target(&peer, request.target, inspect).await?;
        Ok(Response::new(InspectNetnsResponse {
            instance_id: self.instance_id.clone(),
            ..answer
        }))
    }

    type WatchDriftStream = Pin<Box<dyn Stream<Item = Result<WatchDriftResponse, Status>> + Send>>;

    async fn watch_drift(
        &self,
        _request: Request<WatchDriftRequest>,
    ) -> Answer<Self::WatchDriftStream> {
        let stream = watch::watch(
            self.reader.clone(),
            self.probe_set.repairs(),
            &self.instance_id,
        );
        Ok(Response::new(Box::pin(self.shutdown.end_stream(stream))))
    }
}

fn change_of((applied, seen): &(Applied, Observation)) -> Change {
    if applied.changed {
        Change::Read(seen.clone())
    } else {
        Change::None
    }
}

/// Releases a claim after waiting for a change in progress.
async fn release(claims: &Claims, sandbox: &SandboxRef) -> bool {
    let Some(claim) = claims.find(sandbox) else {
        return false;
    };
    let _guard = claim.change_lock.lock().await;
    let released = claims.release(&claim);
    tracing::info!(%sandbox, released, "Released");
    released
}
