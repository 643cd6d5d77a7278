//! Judges traffic by the faults and changes of its pod, the services and ztunnel until then.

use std::{
    collections::BTreeMap,
    net::IpAddr,
    time::{Duration, Instant},
};

/// Rules that were changed from outside are restored within this while netconfig and pod-events run.
pub(crate) const REPAIR: Duration = Duration::from_secs(1);

/// Connections from before rules have this time to end once new ones are captured (decision 44).
const SETTLING: Duration = Duration::from_secs(1);

/// A service that was started or continued is in sync with the others after this.
const RESUME: Duration = Duration::from_secs(2);

/// A DEL that is wrong about a running pod is rejected after a minute.
pub(crate) const REJECTION: Duration = Duration::from_secs(62);

/// A kill takes effect a moment after it was requested, and an observation comes a moment late.
const MOMENT: Duration = Duration::from_millis(500);

/// Outages that ended longer ago excuse nothing more.
const MEMORY: Duration = Duration::from_secs(180);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) from: Instant,
    /// `None` while it lasts.
    pub(crate) to: Option<Instant>,
}

impl Span {
    pub(crate) const fn new(from: Instant, to: Instant) -> Self {
        Self { from, to: Some(to) }
    }

    fn meets(&self, other: &Self) -> bool {
        let before = |end: Option<Instant>, begin| end.is_some_and(|end| end < begin);
        !before(self.to, other.from) && !before(other.to, self.from)
    }
}

/// The way of a pod's packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    Captured,
    Direct,
}

/// The promise to a sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Promise {
    /// `None` while its enrollment changes.
    pub(crate) way: Option<Way>,
    /// Connections are made and kept.
    pub(crate) works: bool,
}

impl Promise {
    pub(crate) const NOTHING: Self = Self {
        way: None,
        works: false,
    };
    pub(crate) const CHANGES: Self = Self {
        way: None,
        works: true,
    };

    pub(crate) const fn of(way: Way) -> Self {
        Self {
            way: Some(way),
            works: true,
        }
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Attempt {
    pub(crate) sandbox: u32,
    pub(crate) span: Span,
    pub(crate) is_inbound: bool,
    pub(crate) outcome: Result<Way, String>,
}

/// A long connection that broke.
#[derive(Clone, Debug)]
pub(crate) struct Lost {
    pub(crate) sandbox: u32,
    pub(crate) way: Way,
    pub(crate) is_inbound: bool,
    pub(crate) opened: Instant,
    /// From the last answer to the error.
    pub(crate) broke: Span,
    pub(crate) error: String,
}

/// An observation of traffic.
#[derive(Clone, Debug)]
pub(crate) enum Record {
    Attempt(Attempt),
    Lost(Lost),
    /// A packet of an application, seen outside of its pod.
    Packet {
        source: IpAddr,
        port: u16,
        at: Instant,
    },
}

#[derive(Debug)]
struct Ledger {
    name: String,
    promises: Vec<(Instant, Promise)>,
    tears: Vec<Span>,
    /// Nothing is repaired meanwhile: a DEL, right or wrong, was called.
    pauses: Vec<Span>,
    /// Since when, by ztunnel.
    served: BTreeMap<String, Instant>,
}

/// A service, or a ztunnel, that is down or hangs.
#[derive(Debug)]
struct Outage {
    of: String,
    span: Span,
}

#[derive(Debug, Default)]
pub(crate) struct Oracle {
    ledgers: BTreeMap<u32, Ledger>,
    addresses: BTreeMap<IpAddr, u32>,
    outages: Vec<Outage>,
    /// Ztunnels that accept no more connections, since their SIGTERM or SIGKILL.
    left: BTreeMap<String, Instant>,
    /// Times at which ending ztunnels cut connections.
    cuts: Vec<Span>,
}

impl Oracle {
    pub(crate) fn know(&mut self, sandbox: u32, name: String, addresses: [IpAddr; 2]) {
        self.addresses.extend(addresses.map(|it| (it, sandbox)));
        let ledger = Ledger {
            name,
            promises: Vec::new(),
            tears: Vec::new(),
            pauses: Vec::new(),
            served: BTreeMap::new(),
        };
        self.ledgers.insert(sandbox, ledger);
    }

    fn change(&mut self, sandbox: u32, change: impl FnOnce(&mut Ledger)) {
        if let Some(ledger) = self.ledgers.get_mut(&sandbox) {
            change(ledger);
        }
    }

    pub(crate) fn promise(&mut self, sandbox: u32, since: Instant, promise: Promise) {
        self.change(sandbox, |it| it.promises.push((since, promise)));
    }

    /// The sandbox ends: connections may fail, and its rules stay.
    pub(crate) fn ends(&mut self, sandbox: u32, since: Instant) {
        let way = |ledger: &Ledger| ledger.promises.last().and_then(|(_, last)| last.way);
        self.change(sandbox, |it| {
            let way = way(it).filter(|way| *way == Way::Captured);
            it.promises.push((since, Promise { way, works: false }));
            it.pauses.push(Span {
                from: since,
                to: None,
            });
        });
    }

    pub(crate) fn torn(&mut self, sandbox: u32, tear: Span) {
        self.change(sandbox, |it| it.tears.push(tear));
    }

    pub(crate) fn tears(&self, sandbox: u32) -> &[Span] {
        let ledger = self.ledgers.get(&sandbox);
        ledger.map_or(&[], |ledger| &ledger.tears)
    }

    pub(crate) fn repairs_pause(&mut self, sandbox: u32, span: Span) {
        self.change(sandbox, |it| it.pauses.push(span));
    }

    pub(crate) fn served(&mut self, sandbox: u32, ztunnel: &str, since: Instant) {
        self.change(sandbox, |it| {
            it.served.entry(ztunnel.to_owned()).or_insert(since);
        });
    }

    pub(crate) fn goes_down(&mut self, of: &str, from: Instant) {
        let span = Span { from, to: None };
        let of = of.to_owned();
        self.outages.push(Outage { of, span });
    }

    pub(crate) fn comes_back(&mut self, of: &str, at: Instant) {
        let mut outages = self.outages.iter_mut();
        if let Some(outage) = outages.find(|it| it.of == of && it.span.to.is_none()) {
            outage.span.to = Some(at);
        }
        let is_recent = |outage: &Outage| outage.span.to.is_none_or(|to| at < to + MEMORY);
        self.outages.retain(is_recent);
    }

    /// It accepts no more connections.
    pub(crate) fn leaves(&mut self, ztunnel: &str, at: Instant) {
        self.left.entry(ztunnel.to_owned()).or_insert(at);
    }

    pub(crate) fn cuts(&mut self, span: Span) {
        self.cuts.push(span);
    }

    /// Returns the promise that held during the whole span.
    fn promise_over(&self, sandbox: u32, span: &Span) -> Promise {
        let ledger = self.ledgers.get(&sandbox);
        let promises = ledger.map_or(&[][..], |ledger| &ledger.promises);
        let is_later = |(since, _): &&(Instant, Promise)| span.to.is_none_or(|to| *since <= to);
        let first = promises.iter().rposition(|(since, _)| *since <= span.from);
        let Some(during) = first.and_then(|first| promises.get(first..)) else {
            return Promise::NOTHING;
        };
        let during = during.iter().take_while(is_later).map(|(_, it)| *it);
        let both = |one: Promise, other: Promise| Promise {
            way: one.way.filter(|way| other.way == Some(*way)),
            works: one.works && other.works,
        };
        during.reduce(both).unwrap_or(Promise::NOTHING)
    }

    /// Returns when the repair of a tear can begin; `None` if that is not known yet.
    fn repair_begins(&self, ledger: &Ledger, tear: &Span) -> Option<Instant> {
        let outages = self.outages.iter();
        let outages = outages.filter(|it| ["netconfig", "pod-events"].contains(&it.of.as_str()));
        let outages = outages.map(|it| Span {
            to: it.span.to.map(|to| to + RESUME),
            ..it.span
        });
        let hindrances: Vec<_> = outages.chain(ledger.pauses.iter().copied()).collect();
        let mut from = tear.to?;
        loop {
            let repair = Span::new(from, from + REPAIR);
            let hinders = |it: &&Span| it.to != Some(from) && it.meets(&repair);
            match hindrances.iter().find(hinders) {
                Some(hindrance) => from = hindrance.to?,
                None => return Some(from),
            }
        }
    }

    /// Returns whether the sandbox's rules may be torn at some time of the span.
    fn is_torn(&self, sandbox: u32, span: &Span) -> bool {
        self.is_torn_or(Duration::ZERO, sandbox, span)
    }

    /// Returns whether they may be torn, or may have been until a moment ago.
    fn is_torn_or(&self, ago: Duration, sandbox: u32, span: &Span) -> bool {
        let Some(ledger) = self.ledgers.get(&sandbox) else {
            return true;
        };
        ledger.tears.iter().any(|tear| {
            let begins = self.repair_begins(ledger, tear);
            let to = begins.map(|it| it + REPAIR + ago);
            let from = tear.from;
            Span { from, to }.meets(span)
        })
    }

    /// Returns how late a direct connection was after the repair of a tear could begin.
    pub(crate) fn lateness(&self, attempt: &Attempt) -> Option<Duration> {
        let ledger = self.ledgers.get(&attempt.sandbox)?;
        let mut begun = ledger
            .tears
            .iter()
            .filter(|it| it.from <= attempt.span.from);
        let begin = self.repair_begins(ledger, begun.next_back()?)?;
        attempt.span.from.checked_duration_since(begin)
    }

    /// Returns whether a ztunnel that is not disturbed serves the sandbox during the whole span.
    fn is_served(&self, sandbox: u32, span: &Span) -> bool {
        let Some(ledger) = self.ledgers.get(&sandbox) else {
            return false;
        };
        let serves = |(ztunnel, since): (&String, &Instant)| {
            let left = self.left.get(ztunnel);
            *since <= span.from && left.is_none_or(|left| span.to.is_some_and(|to| *left > to))
        };
        // Ztunnels share the ports: each may be given the connection.
        let disturbs = |it: &Outage| {
            let to = it.span.to.map(|to| to + MOMENT);
            let from = it.span.from;
            it.of.starts_with("ztunnel-")
                && it.of != "ztunnel-broker"
                && Span { from, to }.meets(span)
        };
        ledger.served.iter().any(serves) && !self.outages.iter().any(disturbs)
    }

    /// Returns the violation of a promise.
    pub(crate) fn judge(&self, record: &Record) -> Option<(u32, Instant, String)> {
        match record {
            Record::Attempt(attempt) => {
                let fault = self.judge_attempt(attempt)?;
                let side = side(attempt.is_inbound);
                Some((
                    attempt.sandbox,
                    attempt.span.from,
                    format!("{side}: {fault}"),
                ))
            }
            Record::Lost(lost) => {
                let fault = self.judge_lost(lost)?;
                Some((lost.sandbox, lost.broke.from, fault))
            }
            Record::Packet { source, port, at } => {
                let sandbox = *self.addresses.get(source)?;
                let span = Span::new(at.checked_sub(MOMENT)?, *at);
                let is_promised = self.promise_over(sandbox, &span).way == Some(Way::Captured);
                let is_fault = is_promised && !self.is_torn_or(SETTLING, sandbox, &span);
                let fault = || format!("a packet from port {port} was seen outside of capture");
                is_fault.then(|| (sandbox, *at, fault()))
            }
        }
    }

    fn is_captured(&self, sandbox: u32, span: &Span) -> bool {
        let promise = self.promise_over(sandbox, span);
        promise.way == Some(Way::Captured) && !self.is_torn(sandbox, span)
    }

    pub(crate) fn is_promised_capture(&self, attempt: &Attempt) -> bool {
        let promise = self.promise_over(attempt.sandbox, &attempt.span);
        promise.way == Some(Way::Captured)
    }

    fn judge_attempt(&self, attempt: &Attempt) -> Option<String> {
        let (sandbox, span) = (attempt.sandbox, &attempt.span);
        let promise = self.promise_over(sandbox, span);
        match &attempt.outcome {
            Ok(Way::Direct) if self.is_captured(sandbox, span) => {
                Some("a connection was direct".to_owned())
            }
            Ok(Way::Captured) if promise.way == Some(Way::Direct) => {
                Some("a connection of a pod outside of the mesh was captured".to_owned())
            }
            Err(error) => {
                let is_served =
                    || promise.way == Some(Way::Direct) || self.is_served(sandbox, span);
                let is_fault = promise.works && !self.is_torn(sandbox, span) && is_served();
                is_fault.then(|| format!("a connection failed: {error}"))
            }
            Ok(_) => None,
        }
    }

    fn judge_lost(&self, lost: &Lost) -> Option<String> {
        let life = Span {
            from: lost.opened,
            ..lost.broke
        };
        let promise = self.promise_over(lost.sandbox, &life);
        let is_covered = match lost.way {
            Way::Direct => promise.way == Some(Way::Direct),
            Way::Captured => {
                let is_torn = self.tears(lost.sandbox).iter().any(|it| it.meets(&life));
                let broke = Span {
                    from: lost.broke.from.checked_sub(MOMENT)?,
                    to: lost.broke.to,
                };
                // If pod-events restarts while a pod joins, it may undo the enrollment and begin anew.
                let opening = Span::new(lost.opened, lost.opened);
                let was_enrolled =
                    self.promise_over(lost.sandbox, &opening).way == Some(Way::Captured);
                // Which ztunnel carries it is not known.
                let is_cut = self.cuts.iter().any(|cut| cut.meets(&broke));
                was_enrolled && !is_torn && !is_cut
            }
        };
        let side = side(lost.is_inbound);
        let way = lost.way;
        let fault = || format!("{side}: a long connection ({way:?}) broke: {}", lost.error);
        (promise.works && is_covered).then(fault)
    }

    pub(crate) fn name(&self, sandbox: u32) -> &str {
        let ledger = self.ledgers.get(&sandbox);
        ledger.map_or("", |ledger| &ledger.name)
    }
}

const fn side(is_inbound: bool) -> &'static str {
    if is_inbound { "inbound" } else { "outbound" }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: u32 = 1;

    /// An enrolled sandbox that ztunnel-1 serves from second 0 on.
    struct Case {
        zero: Instant,
        oracle: Oracle,
    }

    impl Case {
        fn new() -> Self {
            let zero = Instant::now() + Duration::from_secs(1000);
            let mut oracle = Oracle::default();
            let addresses = [[10, 0, 0, 1].into(), [0; 16].into()];
            oracle.know(A, "a".to_owned(), addresses);
            oracle.promise(A, zero, Promise::of(Way::Captured));
            oracle.served(A, "ztunnel-1", zero);
            Self { zero, oracle }
        }

        fn at(&self, second: u64) -> Instant {
            self.zero + Duration::from_secs(second)
        }

        fn span(&self, from: u64, to: u64) -> Span {
            Span::new(self.at(from), self.at(to))
        }

        fn is_fault(&self, second: u64, outcome: Result<Way, &str>) -> bool {
            let attempt = Attempt {
                sandbox: A,
                span: self.span(second, second),
                is_inbound: false,
                outcome: outcome.map_err(str::to_owned),
            };
            let packet = Record::Packet {
                source: [10, 0, 0, 1].into(),
                port: 20_000,
                at: self.at(second),
            };
            let is_direct = attempt.outcome == Ok(Way::Direct);
            let is_fault = self.oracle.judge(&Record::Attempt(attempt)).is_some();
            // A packet is judged like a direct connection.
            assert!(!is_direct || is_fault == self.oracle.judge(&packet).is_some());
            is_fault
        }

        fn is_lost(&self, opened: u64, broke: u64) -> bool {
            let lost = Lost {
                sandbox: A,
                way: Way::Captured,
                is_inbound: false,
                opened: self.at(opened),
                broke: self.span(broke, broke),
                error: String::new(),
            };
            self.oracle.judge(&Record::Lost(lost)).is_some()
        }
    }

    #[test]
    fn a_direct_connection_is_a_fault_while_capture_is_promised() {
        let mut case = Case::new();
        assert!(case.is_fault(1, Ok(Way::Direct)) && !case.is_fault(1, Ok(Way::Captured)));
        case.oracle.promise(A, case.at(10), Promise::CHANGES);
        assert!(!case.is_fault(11, Ok(Way::Direct)) && !case.is_fault(11, Ok(Way::Captured)));
        case.oracle
            .promise(A, case.at(20), Promise::of(Way::Direct));
        assert!(!case.is_fault(21, Ok(Way::Direct)) && case.is_fault(21, Ok(Way::Captured)));
        case.oracle
            .promise(A, case.at(30), Promise::of(Way::Captured));
        case.oracle.ends(A, case.at(40));
        assert!(case.is_fault(41, Ok(Way::Direct)) && !case.is_fault(41, Err("refused")));
    }

    #[test]
    fn a_tear_excuses_until_a_repair_was_possible() {
        let mut case = Case::new();
        case.oracle.torn(A, case.span(10, 10));
        assert!(case.is_fault(8, Ok(Way::Direct)) && !case.is_fault(10, Ok(Way::Direct)));
        assert!(!case.is_fault(10, Err("refused")) && case.is_fault(13, Err("refused")));
        assert!(case.is_fault(13, Ok(Way::Direct)));
        case.oracle.goes_down("ztunnel-broker", case.at(10));
        assert!(case.is_fault(13, Ok(Way::Direct)));
        case.oracle.goes_down("netconfig", case.at(10));
        assert!(!case.is_fault(60, Ok(Way::Direct)));
        case.oracle.comes_back("netconfig", case.at(20));
        assert!(!case.is_fault(21, Ok(Way::Direct)) && case.is_fault(26, Ok(Way::Direct)));
        case.oracle.repairs_pause(A, case.span(9, 40));
        assert!(!case.is_fault(40, Ok(Way::Direct)) && case.is_fault(43, Ok(Way::Direct)));
    }

    #[test]
    fn a_connection_may_fail_only_without_a_ztunnel_that_serves_it() {
        let mut case = Case::new();
        assert!(case.is_fault(1, Err("refused")));
        for service in ["netconfig", "pod-events", "ztunnel-broker"] {
            case.oracle.goes_down(service, case.at(2));
        }
        assert!(case.is_fault(3, Err("refused")));
        case.oracle.goes_down("ztunnel-1", case.at(4));
        assert!(!case.is_fault(5, Err("refused")));
        case.oracle.comes_back("ztunnel-1", case.at(6));
        assert!(case.is_fault(8, Err("refused")));
        case.oracle.leaves("ztunnel-1", case.at(10));
        assert!(!case.is_fault(11, Err("refused")));
        case.oracle.served(A, "ztunnel-2", case.at(12));
        assert!(case.is_fault(13, Err("refused")));
    }

    #[test]
    fn a_long_connection_may_break_by_a_tear_or_by_the_end_of_a_ztunnel() {
        let mut case = Case::new();
        case.oracle.goes_down("pod-events", case.at(1));
        assert!(case.is_lost(1, 5));
        case.oracle.cuts(case.span(10, 10));
        assert!(!case.is_lost(1, 10) && case.is_lost(1, 9) && case.is_lost(1, 12));
        case.oracle.torn(A, case.span(20, 20));
        assert!(!case.is_lost(15, 30) && case.is_lost(22, 30));
        case.oracle.promise(A, case.at(40), Promise::CHANGES);
        assert!(
            case.is_lost(35, 41),
            "captured connections of a pod that leaves live on"
        );
        case.oracle.ends(A, case.at(50));
        assert!(!case.is_lost(35, 51));
    }
}
