//! Actions on pods, services, rules and the API server.

use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use integration::{Api, Call, Inhabitant, Pod, SERVICES, TIMEOUT, eventually};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::kube::alone::chaos::{
    oracle::{Promise, REJECTION, Span, Way},
    run::{API_SERVER, Chaos, Down},
    subject::{Alive, Answered, MAX_TEARS, MODES, Mode, Subject, TEARS_APART, wanted},
    traffic::Traffic,
};

/// The maximum number of pods at once.
const MAX_PODS: usize = 16;

/// A runtime's actions at a sandbox's end.
#[derive(Clone, Copy)]
struct End {
    /// Processes and traffic end before the DEL.
    is_quiet: bool,
    /// The runtime calls no DEL.
    is_lost: bool,
    /// Number of repeated DELs, and the delay between them.
    again: (u32, Duration),
    /// Deletes the object before or after the DEL; `None` if the pod stays.
    object: Option<Order>,
}

#[derive(Clone, Copy)]
enum Order {
    Before,
    After,
}

impl Chaos {
    pub(crate) fn step(&mut self) -> anyhow::Result<()> {
        let pause = Duration::from_millis(self.rng.u64(10..250));
        self.pass(pause)?;
        let what = match self.rng.u32(0..1000) {
            0..200 => self.come()?,
            200..270 => self.go(),
            270..310 => self.replace()?,
            310..490 => self.flip()?,
            490..530 => self.flip_namespace(),
            530..700 => self.tear()?,
            700..735 => self.kill()?,
            735..765 => self.hang()?,
            765..769 => self.kill_ztunnel()?,
            769..773 => self.hang_ztunnel()?,
            773..785 => self.take_over()?,
            785..800 => self.stall_api_server()?,
            800..803 => self.restart_api_server(),
            803..820 => self.collect_garbage(),
            820..830 => self.delete_wrongly(),
            _ => self.repeat_add(),
        };
        *self.done.entry(what.unwrap_or("nothing")).or_default() += 1;
        Ok(())
    }

    fn is_api_there(&self) -> bool {
        !self.down.contains_key(API_SERVER) && self.restarting.is_none()
    }

    /// Returns any pod that meets a condition.
    fn any(&mut self, is_meant: impl Fn(&Subject) -> bool) -> Option<String> {
        let all = self.subjects.iter();
        let names = all.filter(|(_, it)| is_meant(it)).map(|(name, _)| name);
        let names: Vec<_> = names.cloned().collect();
        self.rng.choice(names)
    }

    fn come(&mut self) -> anyhow::Result<Option<&'static str>> {
        if self.subjects.len() >= MAX_PODS || !self.is_api_there() {
            return Ok(None);
        }
        let again = self.names.1.try_recv().ok();
        let name = again.unwrap_or_else(|| format!("p{}", self.made));
        let mode = self.rng.choice(MODES).flatten();
        self.create(&name, mode, false)?;
        Ok(Some("pod created"))
    }

    pub(crate) fn create(&mut self, name: &str, mode: Mode, is_fixed: bool) -> anyhow::Result<()> {
        let uid = self.cluster.create(&self.cluster.object(name, mode));
        let (number, pod) = self.sandbox(name, &uid);
        let subject = Subject {
            uid,
            mode,
            number,
            pod,
            alive: None,
            adding: None,
            changed: None,
            free_from: Instant::now(),
            is_fixed,
        };
        self.subjects.insert(name.to_owned(), subject);
        self.note(format!("{name} ({number}): created as {mode:?}"));
        self.add(name, Duration::ZERO);
        Ok(())
    }

    fn sandbox(&mut self, name: &str, uid: &str) -> (u32, Arc<Pod>) {
        self.made += 1;
        let pod = self.cluster.sandbox(name, uid);
        self.oracle
            .know(self.made, name.to_owned(), pod.addresses());
        (self.made, Arc::new(pod))
    }

    /// Calls ADD; a process and traffic begin with its success.
    pub(crate) fn add(&mut self, name: &str, delay: Duration) {
        let namespace = self.subjects.get("witness").and_then(|it| it.changed);
        let Some(subject) = self.subjects.get_mut(name) else {
            return;
        };
        // The namespace's label may not be known yet.
        if subject.mode.is_none() {
            subject.changed = namespace;
        }
        let call = self.cluster.node.call(Call::add, &subject.pod);
        let call = call.timeout_seconds(10);
        let (number, pod) = (subject.number, Arc::clone(&subject.pod));
        let (runtime, sink) = (self.runtime.handle().clone(), self.sink.clone());
        let outside = Arc::clone(&self.outside);
        subject.adding = Some(thread::spawn(move || {
            thread::sleep(delay);
            let asked = Instant::now();
            let outcome = call.run()?;
            let at = Instant::now();
            let alive = if outcome.code == 0 {
                Some(Alive {
                    traffic: Traffic::start(&runtime, number, &pod, &outside, &sink)?,
                    _inhabitant: Inhabitant::of(&pod)?,
                })
            } else {
                None
            };
            Ok(Answered {
                outcome,
                asked,
                at,
                alive,
            })
        }));
    }

    fn repeat_add(&mut self) -> Option<&'static str> {
        let name = self.any(|it| it.alive.is_none() && it.adding.is_none())?;
        self.add(&name, Duration::ZERO);
        Some("ADD repeated")
    }

    fn go(&mut self) -> Option<&'static str> {
        let name = self.any(Subject::is_free).filter(|_| self.is_api_there())?;
        let object = self.rng.choice([Order::Before, Order::After]);
        let end = self.any_end(object);
        let subject = self.subjects.remove(&name)?;
        self.end(&name, subject.number, &subject.pod, subject.alive, end);
        Some("pod deleted")
    }

    fn any_end(&mut self, object: Option<Order>) -> End {
        End {
            // Without a DEL, processes end in any case.
            is_quiet: self.rng.bool(),
            is_lost: self.rng.u32(0..5) == 0,
            again: (
                self.rng.u32(0..3),
                Duration::from_millis(self.rng.u64(0..4000)),
            ),
            object,
        }
    }

    /// Ends a sandbox beside the run.
    fn end(&mut self, name: &str, number: u32, pod: &Arc<Pod>, alive: Option<Alive>, end: End) {
        let now = Instant::now();
        self.oracle.ends(number, now);
        let how = if end.is_lost {
            "without DEL"
        } else {
            "with DEL"
        };
        self.note(format!("{name} ({number}): ends {how}"));
        let (path, server) = (self.cluster.path(name), Arc::clone(&self.cluster.server));
        let names = self.names.0.clone();
        let [del, again] = [Call::del, Call::del_again].map(|it| self.cluster.node.call(it, pod));
        let (name, pod) = (name.to_owned(), Arc::clone(pod));
        self.threads.push(thread::spawn(move || {
            let delete = || {
                let deleted = eventually("its object is deleted", 3 * TIMEOUT, || {
                    server.delete(&path)
                });
                names.send(name.clone()).unwrap_or_default();
                deleted
            };
            let mut alive = alive.filter(|_| !end.is_quiet && !end.is_lost);
            if matches!(end.object, Some(Order::Before)) {
                delete()?;
            }
            let succeeds = |call: &Call| {
                let outcome = call.run()?;
                let is_right = outcome.code == 0 && outcome.stdout.is_empty();
                ensure!(is_right, "DEL of {name}: {outcome:?}");
                anyhow::Ok(())
            };
            if !end.is_lost {
                succeeds(&del)?;
            }
            drop(alive.take());
            pod.unmount()?;
            if matches!(end.object, Some(Order::After)) {
                delete()?;
            }
            let (times, delay) = end.again;
            for _ in 0..if end.is_lost { 0 } else { times } {
                succeeds(&again)?;
                thread::sleep(delay);
            }
            Ok(())
        }));
    }

    /// The runtime makes a pod's sandbox anew, before or after the DEL of the old one.
    fn replace(&mut self) -> anyhow::Result<Option<&'static str>> {
        let Some(name) = self.any(Subject::is_free) else {
            return Ok(None);
        };
        let end = self.any_end(None);
        let delay = Duration::from_millis(self.rng.u64(0..300));
        let subject = self.subjects.get(&name).context("a pod")?;
        let uid = subject.uid.clone();
        let (number, pod) = self.sandbox(&name, &uid);
        let subject = self.subjects.get_mut(&name).context("a pod")?;
        let old = (
            std::mem::replace(&mut subject.number, number),
            std::mem::replace(&mut subject.pod, pod),
            subject.alive.take(),
        );
        self.end(&name, old.0, &old.1, old.2, end);
        self.note(format!("{name} ({number}): replaces {}", old.0));
        self.add(&name, delay);
        Ok(Some("sandbox replaced"))
    }

    /// Returns whether the agent has seen the namespace's last label.
    fn is_namespace_known(&self) -> bool {
        let witness = self.subjects.get("witness");
        witness.is_none_or(|it| it.changed.is_none())
    }

    /// Begins a change of what labels ask for.
    fn relabel(&mut self, name: &str, mode: Mode, is_namespace_in: bool) -> Option<()> {
        let is_known = self.is_namespace_known();
        let subject = self.subjects.get_mut(name)?;
        let before = wanted(subject.mode, self.is_namespace_in);
        let after = wanted(mode, is_namespace_in);
        subject.mode = mode;
        if before == after {
            return Some(());
        }
        let now = Instant::now();
        subject.changed = Some(now);
        if before.0 != after.0 || !is_known {
            self.oracle.promise(subject.number, now, Promise::CHANGES);
            let traffic = subject.alive.as_ref().map(|it| &it.traffic);
            traffic?.allow_long(after.0 == Way::Captured);
        }
        Some(())
    }

    fn flip(&mut self) -> anyhow::Result<Option<&'static str>> {
        let name = self.any(Subject::is_free).filter(|_| self.is_api_there());
        let (Some(name), Some(mode)) = (name, self.rng.choice(MODES)) else {
            return Ok(None);
        };
        self.relabel(&name, mode, self.is_namespace_in);
        self.note(format!("{name}: labelled {mode:?}"));
        let labels = json!({"istio.io/dataplane-mode": mode});
        let change = json!({"metadata": {"labels": labels}});
        let path = self.cluster.path(&name);
        self.cluster.server.patch(&path, &change)?;
        // The agent may hear of it only now.
        if let Some(subject) = self.subjects.get_mut(&name) {
            subject.changed = subject.changed.map(|_| Instant::now());
        }
        Ok(Some("label changed"))
    }

    /// Only when every pod without a label is settled: a report about it then follows from the change.
    fn flip_namespace(&mut self) -> Option<&'static str> {
        let without = self.subjects.iter().filter(|(_, it)| it.mode.is_none());
        let without: Vec<_> = without.collect();
        let is_ready = without
            .iter()
            .all(|(_, it)| it.is_settled() && Instant::now() >= it.free_from);
        if !self.is_api_there() || !is_ready {
            return None;
        }
        let names: Vec<_> = without.into_iter().map(|(name, _)| name.clone()).collect();
        let is_in = !self.is_namespace_in;
        for name in &names {
            self.relabel(name, None, is_in);
        }
        self.label_namespace(is_in);
        for name in &names {
            self.subjects.get_mut(name)?.changed = Some(Instant::now());
        }
        Some("namespace's label changed")
    }

    fn tear(&mut self) -> anyhow::Result<Option<&'static str>> {
        let Some(name) = self.any(|it| it.alive.is_some()) else {
            return Ok(None);
        };
        self.tear_at(&name, None)
    }

    /// Removes all or some rules.
    pub(crate) fn tear_at(
        &mut self,
        name: &str,
        command: Option<&[&str]>,
    ) -> anyhow::Result<Option<&'static str>> {
        const COMMANDS: [&[&str]; 9] = [
            &["nft", "flush", "ruleset"],
            &["nft", "delete", "table", "inet", "inpod-nat"],
            &["nft", "delete", "table", "inet", "inpod-mangle"],
            &["nft", "flush", "chain", "inet", "inpod-nat", "output"],
            &["nft", "flush", "chain", "inet", "inpod-nat", "prerouting"],
            &["ip", "rule", "del", "pref", "500"],
            &["ip", "-6", "rule", "del", "pref", "500"],
            &["ip", "route", "flush", "table", "10500"],
            &["ip", "-6", "route", "flush", "table", "10500"],
        ];
        let subject = self.subjects.get(name).context("a pod")?;
        let now = Instant::now();
        let tears = self.oracle.tears(subject.number).iter().rev();
        let is_recent =
            |later: Instant, tear: &Span| tear.to.is_some_and(|to| later < to + TEARS_APART);
        let mut later = now;
        let in_a_row = tears.take_while(|tear| {
            let is_recent = is_recent(later, tear);
            later = tear.from;
            is_recent
        });
        if in_a_row.count() >= MAX_TEARS {
            return Ok(None);
        }
        let single = self.rng.bool().then(|| any_rule(&subject.pod)).flatten();
        let any = self.rng.choice(COMMANDS).unwrap_or_default();
        let any: Vec<String> = command
            .unwrap_or(any)
            .iter()
            .map(|&it| it.to_owned())
            .collect();
        let command = single.filter(|_| command.is_none()).unwrap_or(any);
        let arguments: Vec<&str> = command.iter().map(String::as_str).collect();
        // There may be none.
        let is_torn = subject.pod.exec(&arguments).is_ok();
        let number = subject.number;
        let tear = Span::new(now, Instant::now());
        self.oracle.torn(number, tear);
        self.figures.fault("rules torn", now, tear.to);
        self.note(format!(
            "{name} ({number}): {} ({is_torn})",
            command.join(" ")
        ));
        Ok(Some("rules torn out"))
    }

    fn any_service(&mut self) -> Option<&'static str> {
        let what = self.rng.choice(SERVICES);
        what.filter(|it| !self.down.contains_key(it))
    }

    fn kill(&mut self) -> anyhow::Result<Option<&'static str>> {
        let Some(what) = self.any_service() else {
            return Ok(None);
        };
        self.goes_down(what, "SIGKILL");
        self.cluster.node.stop(what, Signal::SIGKILL)?;
        let time = self.rng.u64(0..1500);
        self.down_for(what, time, false);
        Ok(Some("service killed"))
    }

    fn down_for(&mut self, what: &'static str, milliseconds: u64, hangs: bool) {
        let until = Instant::now() + Duration::from_millis(milliseconds);
        self.down.insert(what, Down { until, hangs });
    }

    fn hang(&mut self) -> anyhow::Result<Option<&'static str>> {
        let Some(what) = self.any_service() else {
            return Ok(None);
        };
        self.goes_down(what, "SIGSTOP");
        self.cluster.node.signal(what, Signal::SIGSTOP)?;
        let time = self.rng.u64(200..6000);
        self.down_for(what, time, true);
        Ok(Some("service hung"))
    }

    fn kill_ztunnel(&mut self) -> anyhow::Result<Option<&'static str>> {
        if self.ztunnels.is_empty() || self.hung_ztunnel.is_some() {
            return Ok(None);
        }
        let index = self.rng.usize(0..self.ztunnels.len());
        let killed = self.ztunnels.remove(index);
        let from = Instant::now();
        self.oracle.leaves(&killed.name, from);
        self.goes_down(&killed.name, "SIGKILL");
        self.cluster.node.stop(&killed.name, Signal::SIGKILL)?;
        self.comes_back(&killed.name);
        self.oracle
            .cuts(Span::new(from, Instant::now() + Duration::from_secs(1)));
        if self.ztunnels.iter().all(|it| it.leaves.is_some()) {
            let time = Duration::from_millis(self.rng.u64(0..1500));
            self.next_ztunnel = Some(Instant::now() + time);
        }
        Ok(Some("ztunnel killed"))
    }

    fn hang_ztunnel(&mut self) -> anyhow::Result<Option<&'static str>> {
        let is_busy =
            self.hung_ztunnel.is_some() || self.ztunnels.iter().any(|it| it.leaves.is_some());
        let any = self.rng.choice(&self.ztunnels).filter(|_| !is_busy);
        let Some(name) = any.map(|it| it.name.clone()) else {
            return Ok(None);
        };
        self.goes_down(&name, "SIGSTOP");
        self.cluster.node.signal(&name, Signal::SIGSTOP)?;
        let time = Duration::from_millis(self.rng.u64(200..6000));
        self.hung_ztunnel = Some((name, Instant::now() + time));
        Ok(Some("ztunnel hung"))
    }

    /// Another ztunnel comes; the first goes when the other serves all its pods.
    fn take_over(&mut self) -> anyhow::Result<Option<&'static str>> {
        if self.ztunnels.len() != 1 || self.next_ztunnel.is_some() {
            return Ok(None);
        }
        self.start_ztunnel()?;
        Ok(Some("takeover"))
    }

    fn stall_api_server(&mut self) -> anyhow::Result<Option<&'static str>> {
        if !self.is_api_there() {
            return Ok(None);
        }
        self.goes_down(API_SERVER, "SIGSTOP");
        self.cluster.server.signal(Signal::SIGSTOP)?;
        let time = self.rng.u64(500..4000);
        self.down_for(API_SERVER, time, true);
        Ok(Some("API server hung"))
    }

    fn restart_api_server(&mut self) -> Option<&'static str> {
        if !self.is_api_there() {
            return None;
        }
        self.goes_down(API_SERVER, "SIGKILL");
        let server = Arc::clone(&self.cluster.server);
        let time = Duration::from_millis(self.rng.u64(0..3000));
        self.restarting = Some(thread::spawn(move || {
            server.kill()?;
            thread::sleep(time);
            server.run()
        }));
        Some("API server killed")
    }

    /// The list may lack a pod that lives, which is a wrong DEL.
    fn collect_garbage(&mut self) -> Option<&'static str> {
        let all = self.subjects.values();
        let valid: Vec<_> = all.map(|it| it.pod.container_id.clone()).collect();
        self.note("GC".to_owned());
        self.collect(valid);
        Some("garbage collected")
    }

    fn collect(&mut self, valid: Vec<String>) {
        let run_dir = self.cluster.node.run_dir();
        self.threads.push(thread::spawn(move || {
            let valid: Vec<_> = valid.iter().map(String::as_str).collect();
            // pod-events may be down.
            Api::new(&run_dir)?
                .collect("podnet", &valid)
                .map(drop)
                .unwrap_or_default();
            Ok(())
        }));
    }

    /// A pod that lives is deleted, by DEL or by GC; that is rejected.
    fn delete_wrongly(&mut self) -> Option<&'static str> {
        let is_namespace_in = self.is_namespace_in;
        let is_in = |it: &Subject| wanted(it.mode, is_namespace_in).0 == Way::Captured;
        let name = self.any(|it| it.is_free() && is_in(it))?;
        let subject = self.subjects.get_mut(&name)?;
        // The deletion itself takes a moment, and a spooled one some seconds.
        let until = Instant::now() + REJECTION + Duration::from_secs(20);
        subject.free_from = until + Duration::from_secs(10);
        let pause = Span::new(Instant::now(), until);
        self.oracle.repairs_pause(subject.number, pause);
        let number = subject.number;
        let call = self.cluster.node.call(Call::del, &subject.pod);
        if self.rng.bool() {
            self.note(format!("{name} ({number}): wrong DEL"));
            self.threads
                .push(thread::spawn(move || call.run().map(drop)));
        } else {
            let others = self.subjects.iter().filter(|(other, _)| **other != name);
            let valid = others.map(|(_, it)| it.pod.container_id.clone()).collect();
            self.note(format!("{name} ({number}): wrong GC"));
            self.collect(valid);
        }
        Some("wrong DEL")
    }
}

/// Returns a command that deletes one of the pod's rules.
fn any_rule(pod: &Pod) -> Option<Vec<String>> {
    let listed = pod.exec(&["nft", "-j", "list", "ruleset"]).ok()?;
    let listed: Value = serde_json::from_str(&listed).ok()?;
    let items = listed.get("nftables")?.as_array()?;
    let rules: Vec<_> = items.iter().filter_map(|it| it.get("rule")).collect();
    let rule = fastrand::choice(rules)?;
    let text = |name: &str| rule.get(name).and_then(Value::as_str).map(str::to_owned);
    let handle = rule.get("handle")?.as_u64()?.to_string();
    Some(vec![
        "nft".to_owned(),
        "delete".to_owned(),
        "rule".to_owned(),
        text("family")?,
        text("table")?,
        text("chain")?,
        "handle".to_owned(),
        handle,
    ])
}
