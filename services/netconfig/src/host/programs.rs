//! Programs of iptables in the node's netns, started as those in pods' are.

use super::{RunError, iptables::Runner};
use inpod_types::with_causes;

use crate::{
    backend::Backend,
    error::reason_of_program,
    family::Family,
    iptables::{ProgramError, Programs, Variant},
    netns_session::variant_of,
};

/// The programs of one variant.
#[derive(Debug)]
struct AtHome {
    programs: Programs,
    variant: Variant,
}

impl Runner for AtHome {
    fn save(&self, family: Family) -> Result<String, RunError> {
        let saved = self.programs.save_at_home(self.variant, family);
        saved.map_err(|error| failed(&error))
    }

    fn restore(&self, family: Family, script: &str) -> Result<(), RunError> {
        let restored = self.programs.restore_at_home(self.variant, family, script);
        restored.map_err(|error| failed(&error))
    }
}

fn failed(error: &ProgramError) -> RunError {
    RunError {
        reason: reason_of_program(error),
        message: with_causes(error),
    }
}

/// The way that goes with what pods' rules are written with.
pub(crate) fn by(backend: Backend, programs: &Programs) -> super::By {
    match variant_of(backend) {
        None => super::By::Nftables,
        Some(variant) => super::By::Iptables {
            variant,
            runner: Box::new(AtHome {
                programs: programs.clone(),
                variant,
            }),
        },
    }
}
