//! Writes rules with iptables' own programs: `iptables-save` reads, one `iptables-restore --noflush` per family
//! writes. Atomic per table only; tables and families are ordered such that nothing escapes capture in between.

mod child;
mod layout;
mod lift;
mod lock;
mod normalize;
mod observe;
mod process;
mod programs;
mod render;
mod run;
mod save;
mod script;
mod sidecar;
mod tokens;

pub use child::run_program;
pub use programs::Programs;
pub(crate) use script::jumps;

use inpod_linux::Netns;

use crate::{
    backend::{BackendError, Change, NewTable, Observed, ProgramError, RuleBackend, Variant},
    family::Family,
    rules::{Ruleset, Table},
};
use lock::Session;
use programs::{Action, Program, families};

/// Renders for `iptables-restore --noflush` or `ip6tables-restore` in a netns without inpod's rules, for golden
/// files. Empty without rules for the family.
pub fn script(ruleset: &Ruleset, family: Family, comment: &str) -> String {
    let create = |table| NewTable {
        table,
        comment: comment.to_owned(),
    };
    let change = Change {
        create: normalize::normalize(ruleset, &[family])
            .into_iter()
            .map(create)
            .collect(),
        ..Change::default()
    };
    let scripts = script::scripts(&Observed::default(), &change);
    scripts.into_iter().map(|(_, text)| text).collect()
}

#[derive(Debug)]
pub(crate) struct Iptables<'a> {
    programs: &'a Programs,
    netns: &'a Netns,
    variant: Variant,
}

impl<'a> Iptables<'a> {
    pub(crate) fn new(programs: &'a Programs, variant: Variant, netns: &'a Netns) -> Self {
        Self {
            programs,
            netns,
            variant,
        }
    }

    fn program(&self, family: Family, action: Action) -> Program {
        Program {
            variant: self.variant,
            family,
            action,
        }
    }

    fn read_in(&self, session: &Session) -> Result<Observed, ProgramError> {
        let mut saved = Vec::new();
        for family in families() {
            let program = self.program(*family, Action::Save);
            let printed = self.programs.run(program, self.netns, "", session)?;
            let tables = save::parse(&printed).map_err(|save::Unreadable(line)| {
                ProgramError::Unreadable {
                    program: program.to_string(),
                    line: (!line.is_empty()).then_some(line),
                }
            })?;
            saved.push((*family, tables));
        }
        Ok(observe::observe(&saved))
    }

    fn restore(&self, scripts: &[(Family, String)], session: &Session) -> Result<(), ProgramError> {
        for (family, script) in scripts {
            let program = self.program(*family, Action::Restore);
            self.programs.run(program, self.netns, script, session)?;
        }
        Ok(())
    }

    /// If a concurrent change caused the refusal, there are rules that are neither in `seen` nor in this change.
    fn classify_refusal(
        &self,
        refusal: ProgramError,
        seen: &Observed,
        change: &Change,
        session: &Session,
    ) -> ProgramError {
        let ProgramError::Refused { line, .. } = &refusal else {
            return refusal;
        };
        let is_about_owner_match = is_about_owner_match(line.as_deref(), change);
        match self.read_in(session) {
            Ok(now) if has_concurrent_change(&now, seen, change) => {
                ProgramError::ConcurrentChange(Box::new(refusal))
            }
            Ok(_) | Err(_) if is_about_owner_match => {
                ProgramError::OwnerMatchRefused(Box::new(refusal))
            }
            Ok(_) | Err(_) => refusal,
        }
    }
}

/// For iptables-legacy the kernel refuses the whole table, which is reported at its COMMIT line.
fn is_about_owner_match(line: Option<&str>, change: &Change) -> bool {
    let asks = change
        .create
        .iter()
        .any(|new| new.table.matches_socket_owners());
    let is_named = |line: &str| line.contains(" -m owner ") || line.trim() == "COMMIT";
    asks && line.is_some_and(is_named)
}

/// Returns whether anything differs from both the state before and the requested one.
fn has_concurrent_change(now: &Observed, seen: &Observed, change: &Change) -> bool {
    let created: Vec<_> = change.create.iter().map(|new| &new.table).collect();
    let (now_there, seen_there) = (tables_of(now), tables_of(seen));
    let is_explained = |table: &&Table| {
        let id = table.id();
        let of = |tables: &[&'_ Table]| {
            let found = tables.iter().find(|table| table.id() == id);
            found.copied().cloned()
        };
        match (of(&now_there), of(&created)) {
            (found, _) if found == of(&seen_there) => true,
            (None, _) => change.delete.contains(&id),
            (found, wanted) => found == wanted,
        }
    };
    let mut all = now_there.iter().chain(&seen_there).chain(&created);
    let has_more = |now: &[String], seen: &[String]| now.iter().any(|name| !seen.contains(name));
    !all.all(is_explained)
        || has_more(&now.incumbent, &seen.incumbent)
        || has_more(&now.sidecar, &seen.sidecar)
}

fn tables_of(observed: &Observed) -> Vec<&Table> {
    observed.tables.iter().map(|found| &found.table).collect()
}

impl RuleBackend for Iptables<'_> {
    fn normalize(&self, ruleset: &Ruleset) -> Vec<Table> {
        normalize::normalize(ruleset, families())
    }

    fn read(&mut self) -> Result<Observed, BackendError> {
        let session = self.programs.session(self.variant, self.netns)?;
        Ok(self.read_in(&session)?)
    }

    /// Runs one program per family, which changes each table atomically.
    fn change(&mut self, seen: &Observed, change: &Change) -> Result<(), BackendError> {
        let scripts = script::scripts(seen, change);
        let session = self.programs.session(self.variant, self.netns)?;
        let done = self.restore(&scripts, &session);
        Ok(done.map_err(|refusal| self.classify_refusal(refusal, seen, change, &session))?)
    }

    fn script(&self, seen: &Observed, change: &Change) -> String {
        let scripts = script::scripts(seen, change).into_iter();
        let named = scripts.map(|(family, text)| {
            let program = self.program(family, Action::Restore);
            format!("# {program} --noflush\n{text}")
        });
        named.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        backend::ObservedTable,
        rules::{Expr, Redirection, Rule, ambient},
    };

    fn observed(tables: &[Table]) -> Observed {
        let observed = |table: &Table| ObservedTable {
            table: table.clone(),
            comment: None,
            unknown_objects: 0,
        };
        Observed {
            tables: tables.iter().map(observed).collect(),
            ..Observed::default()
        }
    }

    #[test]
    fn what_is_as_before_or_as_it_was_to_be_is_nobodys_doing_but_ours() {
        let before = normalize::normalize(&ambient::drain(), &[Family::V4]);
        let ruleset = Redirection::Ambient(crate::rules::Ambient::default()).ruleset();
        let after = normalize::normalize(&ruleset, &[Family::V4]);
        let new = |table: &Table| NewTable {
            table: table.clone(),
            comment: String::new(),
        };
        let change = Change {
            create: after.iter().map(new).collect(),
            ..Change::default()
        };
        let seen = observed(&before);
        let [first, second] = [&before, &after].map(|tables| tables[..1].to_vec());
        let half = |some: &[Table], rest: &[Table]| observed(&[some, &rest[1..]].concat());
        for now in [
            seen.clone(),
            observed(&after),
            half(&second, &before),
            half(&first, &after),
        ] {
            assert!(!has_concurrent_change(&now, &seen, &change));
        }
        let mut theirs = before.clone();
        theirs[1].chains[0].rules.push(Rule(vec![Expr::Drop]));
        assert!(has_concurrent_change(&observed(&theirs), &seen, &change));
        assert!(has_concurrent_change(
            &observed(&second),
            &observed(&after),
            &Change::default()
        ));
        let incumbent = Observed {
            incumbent: vec!["ip nat ISTIO_OUTPUT".to_owned()],
            ..seen.clone()
        };
        assert!(has_concurrent_change(&incumbent, &seen, &change));
        assert!(!has_concurrent_change(&seen, &incumbent, &change));
    }
}
