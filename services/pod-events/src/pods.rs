//! The core planned to replace the task of each pod: one table of state and one decision. Only tests use the core so
//! far; `check` explores every order of events and failures.

#[cfg(test)]
mod check;
pub(crate) mod describe;
pub(crate) mod next;
pub(crate) mod state;
#[cfg(test)]
mod table;
