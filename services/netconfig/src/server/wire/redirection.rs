//! Parses redirections. Every successfully parsed redirection can be applied.

use std::net::IpAddr;

use inpod_proto::{
    Invalid,
    netconfig::v1::{self, redirection::Mode},
};
use tonic::Status;

use super::{missing, refuse};
use crate::rules::{Ambient, Redirection, Sidecar};

/// Parses a redirection, and adds the exemption of this node's probes.
pub(in crate::server) fn redirection_of(
    redirection: Option<v1::Redirection>,
    probe_sources: &[IpAddr],
) -> Result<Redirection, Status> {
    let redirection = redirection.ok_or_else(|| missing("redirection"))?;
    let within = |mode| move |invalid: Invalid| refuse(invalid.within(mode));
    match redirection.mode {
        Some(Mode::Ambient(wanted)) => {
            let parsed = Ambient::try_from(wanted).map_err(within("redirection.ambient"))?;
            Ok(Redirection::Ambient(Ambient {
                probe_sources: probe_sources.to_vec(),
                ..parsed
            }))
        }
        Some(Mode::Sidecar(wanted)) => Sidecar::try_from(wanted)
            .map(Redirection::Sidecar)
            .map_err(within("redirection.sidecar")),
        None => Err(missing("redirection.mode")),
    }
}

#[cfg(test)]
mod tests;
