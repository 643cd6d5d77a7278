//! Makes a netns's redirection so, compares it, takes it away. Synchronous: each of these does its work on the calling
//! thread and returns when it is done.

use netns::Netns;
use workload::SandboxRef;

use crate::{
    error::{ApplyError, RemoveError, VerifyError, chain},
    inspect,
    link::{Link, State},
    netlink::KernelError,
    nftables::{Change, NewTable, Observed, ObservedTable, RuleBackend},
    plan::Plan,
    routes::{Family, Item, ORDER},
    rules::{
        Fingerprint, Redirection, Ruleset, Tag,
        ambient::{self, NAT, TABLES},
    },
};

/// How often a change is tried while others keep changing the netns's tables.
const ATTEMPTS: usize = 8;

/// What an apply came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Applied {
    /// Identifies the rules.
    pub fingerprint: Fingerprint,
    /// Whether anything had to be written.
    pub changed: bool,
}

/// What a comparison came to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verified {
    /// Identifies the rules that belong there.
    pub fingerprint: Fingerprint,
    /// One sentence per difference.
    pub differences: Vec<String>,
}

/// How far a redirection is taken away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// New connections go direct, captured ones live on.
    Drain,
    /// Nothing of ours is left.
    Final,
}

/// Makes the redirection of a netns exactly this, and reads it back. Where it is so already nothing is written.
///
/// # Errors
///
/// When the kernel refuses, or holds something else afterwards; what was there before is then put back.
pub fn apply(
    netns: &Netns,
    redirection: Redirection,
    sandbox: &SandboxRef,
) -> Result<Applied, ApplyError> {
    Link::with(netns, |link| make_so(link, redirection, sandbox))
}

fn make_so(
    link: &mut Link,
    redirection: Redirection,
    sandbox: &SandboxRef,
) -> Result<Applied, ApplyError> {
    let plan = Plan::new(redirection.ruleset(), link.has_ipv6);
    let applied = |changed| Applied {
        fingerprint: plan.fingerprint,
        changed,
    };
    let before = link.read()?;
    if plan.differences(&before).is_empty() {
        return Ok(applied(false));
    }
    let mut undo = Undo::new(before);
    match forward(link, &plan, sandbox, &mut undo) {
        Ok(()) => Ok(applied(true)),
        Err(cause) => Err(cause.with_undo_failures(undo.run(link))),
    }
}

/// Routes, then ip rules, then the tables at once: nothing is captured before its replies find their way.
fn forward(
    link: &mut Link,
    plan: &Plan,
    sandbox: &SandboxRef,
    undo: &mut Undo,
) -> Result<(), ApplyError> {
    for item in &plan.routing {
        if !undo.before.routing.has(*item) {
            link.routes.add(*item)?;
            undo.added.push(*item);
        }
    }
    if !plan
        .filter_differences(&undo.before.filter.tables)
        .is_empty()
    {
        replace(
            link,
            &undo.before.filter,
            &plan.ruleset,
            &tag(plan, sandbox),
        )?;
        undo.rewritten = true;
    }
    let differences = plan.differences(&link.read()?);
    if differences.is_empty() {
        Ok(())
    } else {
        Err(ApplyError::of_differences(differences))
    }
}

fn tag(plan: &Plan, sandbox: &SandboxRef) -> String {
    Tag::new(plan.fingerprint, sandbox).to_string()
}

/// Replaces those of our tables that are there by a ruleset's, in one transaction: captured flows survive that
/// (kernel-facts.md, 2).
fn replace(
    link: &mut Link,
    seen: &Observed,
    ruleset: &Ruleset,
    comment: &str,
) -> Result<(), KernelError> {
    let new = |table| NewTable { table, comment };
    change(link, seen, |seen| Change {
        delete: seen.names(),
        create: ruleset.tables.iter().map(new).collect(),
    })
}

/// Changes the tables; again from what is there by then, when somebody else was faster.
fn change<'a>(
    link: &mut Link,
    seen: &Observed,
    wanted: impl Fn(&Observed) -> Change<'a>,
) -> Result<(), KernelError> {
    let mut result = link.filter.change(seen, &wanted(seen));
    for _ in 1..ATTEMPTS {
        match &result {
            Err(error) if error.is_race() => {}
            Ok(()) | Err(_) => break,
        }
        let seen = link.filter.read(&TABLES)?;
        result = link.filter.change(&seen, &wanted(&seen));
    }
    result
}

/// What has to be put back when an apply fails.
struct Undo {
    before: State,
    added: Vec<Item>,
    rewritten: bool,
}

impl Undo {
    fn new(before: State) -> Self {
        Self {
            before,
            added: Vec::new(),
            rewritten: false,
        }
    }

    /// In reverse; what fails is told and the rest goes on.
    fn run(&self, link: &mut Link) -> Vec<String> {
        let mut failures = Vec::new();
        if self.rewritten {
            failures.extend(self.restore_tables(link).err());
        }
        for item in self.added.iter().rev() {
            failures.extend(link.routes.delete(*item).err());
        }
        failures.iter().map(|error| chain(error)).collect()
    }

    fn restore_tables(&self, link: &mut Link) -> Result<(), KernelError> {
        let before = &self.before.filter.tables;
        let now = link.filter.read(&TABLES)?;
        change(link, &now, |now| Change {
            delete: now.names(),
            create: before.iter().map(as_new).collect(),
        })
    }
}

fn as_new(observed: &ObservedTable) -> NewTable<'_> {
    NewTable {
        table: &observed.table,
        comment: observed.comment.as_deref().unwrap_or_default(),
    }
}

/// Compares a netns with a redirection, reading everything back.
///
/// # Errors
///
/// When it cannot be read.
pub fn verify(netns: &Netns, redirection: Redirection) -> Result<Verified, VerifyError> {
    Link::with(netns, |link| {
        let plan = Plan::new(redirection.ruleset(), link.has_ipv6);
        Ok(Verified {
            fingerprint: plan.fingerprint,
            differences: plan.differences(&link.read()?),
        })
    })
}

/// The tag that a netns's tables bear; `None` where there are none of ours.
///
/// # Errors
///
/// When it cannot be read.
pub fn tag_of(netns: &Netns) -> Result<Option<Tag>, VerifyError> {
    Link::with(netns, |link| {
        let observed = link.filter.read(&[NAT])?;
        Ok(observed.tables.iter().find_map(ObservedTable::tag))
    })
}

/// Takes a netns's redirection away as far as the phase says. Gives back how many connections were captured.
///
/// # Errors
///
/// When the kernel refuses, or something is left when it is read back.
pub fn remove(netns: &Netns, sandbox: &SandboxRef, phase: Phase) -> Result<u32, RemoveError> {
    let captured = inspect::captured_flows(netns)?;
    Link::with(netns, |link| match phase {
        Phase::Drain => drain(link, sandbox),
        Phase::Final => remove_all(link),
    })?;
    Ok(captured)
}

/// The nat table gives way to one that captures nothing new; the rest stays, for what is captured lives on.
fn drain(link: &mut Link, sandbox: &SandboxRef) -> Result<(), RemoveError> {
    let plan = Plan::new(ambient::drain(), link.has_ipv6);
    let seen = link.filter.read(&[NAT])?;
    if seen.tables.is_empty() || plan.filter_differences(&seen.tables).is_empty() {
        return Ok(());
    }
    let comment = tag(&plan, sandbox);
    let comment = comment.as_str();
    let new = |table| NewTable { table, comment };
    change(link, &seen, |_| Change {
        delete: vec![NAT.to_owned()],
        create: plan.ruleset.tables.iter().map(new).collect(),
    })?;
    let differences = plan.filter_differences(&link.filter.read(&[NAT])?.tables);
    RemoveError::unless_empty(differences)
}

/// The tables at once, then ip rules, then routes: nothing is led to a table that is empty. What fails does not keep
/// the rest.
fn remove_all(link: &mut Link) -> Result<(), RemoveError> {
    let seen = link.read()?;
    let delete = |seen: &Observed| Change {
        delete: seen.names(),
        create: Vec::new(),
    };
    let mut failures = Vec::new();
    failures.extend(change(link, &seen.filter, delete).err());
    for item in ours(&seen) {
        failures.extend(link.routes.delete(item).err());
    }
    let left = left(&link.read()?);
    match failures.pop() {
        Some(source) => Err(RemoveError::Kernel { source, left }),
        None => RemoveError::unless_empty(left),
    }
}

/// Our ip rules and routes, in the order in which they go.
fn ours(state: &State) -> Vec<Item> {
    let parts = ORDER.into_iter().rev();
    let items = parts.flat_map(|part| Family::ALL.map(|family| (family, part)));
    items.filter(|item| state.routing.has_ours(*item)).collect()
}

/// What is left of ours, a sentence each.
fn left(state: &State) -> Vec<String> {
    let mut left: Vec<_> = state.filter.names();
    for name in &mut left {
        *name = format!("table {name} is left");
    }
    let items = ours(state).into_iter();
    left.extend(items.map(|(family, part)| format!("the {family} {part} is left")));
    left
}
