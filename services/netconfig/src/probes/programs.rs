use super::{RunError, iptables::Runner};
use inpod_types::with_causes;

use crate::{
    backend::{Backend, ProgramError, Variant, variant_of},
    error::reason_of_program,
    family::Family,
    iptables::Programs,
};

#[derive(Debug)]
struct HostPrograms {
    programs: Programs,
    variant: Variant,
}

impl Runner for HostPrograms {
    fn save(&self, family: Family) -> Result<String, RunError> {
        let saved = self.programs.save_on_node(self.variant, family);
        saved.map_err(|error| run_error(&error))
    }

    fn restore(&self, family: Family, script: &str) -> Result<(), RunError> {
        let restored = self.programs.restore_on_node(self.variant, family, script);
        restored.map_err(|error| run_error(&error))
    }
}

fn run_error(error: &ProgramError) -> RunError {
    RunError {
        reason: reason_of_program(error),
        message: with_causes(error),
    }
}

/// Matches the backend of pods' rules.
pub(crate) fn backend_kind_for(backend: Backend, programs: &Programs) -> super::SetBackendKind {
    match variant_of(backend) {
        None => super::SetBackendKind::Nftables,
        Some(variant) => super::SetBackendKind::Iptables {
            variant,
            runner: Box::new(HostPrograms {
                programs: programs.clone(),
                variant,
            }),
        },
    }
}
