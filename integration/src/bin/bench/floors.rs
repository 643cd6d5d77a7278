//! Measures floors: the parts of a call without an agent, in the same run. The sums of the floors are printed beside
//! the calls.

use std::{path::Path, time::Instant};

use anyhow::Context as _;
use integration::{Named, Spec, Verbs, bin, run};
use tokio::runtime::Runtime;

use crate::{
    compare::{Comparison, milliseconds},
    handover::Bare,
    side::Side,
};

pub(crate) const STATIC: &str = "exec of a static program that does nothing";
const TRUE: &str = "exec of `/bin/true`";
const CLIENT: &str = "a bare tonic client: exec and one call";
const CALL: &str = "one unary tonic call on an open connection";
const ADD: &str = "hand-over: a descriptor to ztunnel, which opens its listeners and answers";
const DEL: &str = "a pod taken from ztunnel: a packet, and its answer";

pub(crate) struct Floors {
    table: Comparison,
    runtime: Runtime,
    ztunnel: Bare,
    calls: Verbs,
    next: usize,
}

impl Floors {
    /// Prepares the measurements of the floors, the least times that any agent needs. The services of `side` answer the
    /// measured calls.
    pub(crate) fn new(side: &Side) -> anyhow::Result<Self> {
        let runtime = Runtime::new()?;
        let ztunnel = {
            let _inside = runtime.enter();
            runtime.block_on(Bare::connect())?
        };
        Ok(Self {
            table: Comparison::new("The floors, in the same run", "ms", ["no agent"]),
            runtime,
            ztunnel,
            calls: Verbs::at(&inpod_service::socket(&side.node.run_dir(), "pod-events"))?,
            next: 0,
        })
    }

    fn time(&mut self, what: &str, f: impl FnOnce() -> anyhow::Result<()>) -> anyhow::Result<()> {
        let started = Instant::now();
        f()?;
        self.table.record(what, 0, milliseconds(started.elapsed()));
        Ok(())
    }

    pub(crate) fn measure(&mut self, side: &Side) -> anyhow::Result<()> {
        let socket = inpod_service::socket(&side.node.run_dir(), "pod-events");
        let program = |name| Ok::<_, anyhow::Error>(bin(name)?.display().to_string());
        let (nothing, bare) = (program("nothing")?, program("bare")?);
        self.time(STATIC, || run::<&str>(&nothing, &[]).map(drop))?;
        self.time(TRUE, || run::<&str>("/bin/true", &[]).map(drop))?;
        self.time(CLIENT, || run(&bare, &[&socket]).map(drop))?;
        let nobody = Named::at(&Spec::new("nobody"), "nobody-knows-it", Path::new("/"));
        let answers = self.calls.answers(vec![self.calls.del(&nobody)])?;
        let answer = answers.into_iter().next().context("an answer")?;
        answer.result?;
        self.table.record(CALL, 0, milliseconds(answer.took));
        self.next += 1;
        let name = format!("pod-{}", self.next);
        let pod = self.ztunnel.node.sandbox(Spec::new(&name))?;
        let [add, del] = self.runtime.block_on(self.ztunnel.round_trips(&pod))?;
        self.table.record(ADD, 0, milliseconds(add));
        self.table.record(DEL, 0, milliseconds(del));
        pod.unmount()
    }

    /// Returns the sums for ADD outside and enrolled, and for DEL enrolled and outside. An enrolled pod needs a call
    /// from the plugin, a call to netconfig, and a call to the broker.
    pub(crate) fn sums(&self) -> [f64; 4] {
        let of = |what| self.table.median(what);
        let enrolled = of(CLIENT) + 2.0 * of(CALL);
        [
            of(CLIENT),
            enrolled + of(ADD),
            enrolled + of(DEL),
            of(CLIENT),
        ]
    }

    pub(crate) fn print(&self) -> anyhow::Result<()> {
        self.table.print()
    }
}
