use std::io;

use inpod_cni::{config::AgentUnavailable, enrolled::EnrolledNamespaces};
use inpod_types::NamespaceName;

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Decision {
    Admit,
    Wait(String),
}

/// Decides without the agent: a pod that may belong to the mesh has to wait, unless the configuration admits the pod,
/// and any other pod may start.
pub(crate) fn decide(
    policy: AgentUnavailable,
    enrolled: io::Result<Option<EnrolledNamespaces>>,
    namespace: &NamespaceName,
) -> Decision {
    match (policy, enrolled) {
        (AgentUnavailable::Allow, _) => Decision::Admit,
        (AgentUnavailable::Fail, Ok(Some(enrolled))) if !enrolled.contains(namespace) => {
            Decision::Admit
        }
        (AgentUnavailable::Fail, Ok(Some(_))) => {
            Decision::Wait(format!("namespace {namespace} has pods in the mesh"))
        }
        (AgentUnavailable::Fail, Ok(None)) => {
            Decision::Wait("it has never listed the namespaces with pods in the mesh".to_owned())
        }
        (AgentUnavailable::Fail, Err(error)) => Decision::Wait(format!(
            "the list of enrolled namespaces cannot be read: {error}"
        )),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use inpod_cni::enrolled::ENROLLED_FILE;

    use super::*;

    fn enrolled_list(text: &str) -> io::Result<Option<EnrolledNamespaces>> {
        let dir = tempfile::tempdir()?;
        fs::write(dir.path().join(ENROLLED_FILE), text)?;
        EnrolledNamespaces::read(dir.path())
    }

    #[test]
    fn a_pod_waits_unless_it_is_known_not_to_belong_to_the_mesh() {
        let unreadable = || Err(io::Error::from(io::ErrorKind::PermissionDenied));
        for (enrolled, admitted) in [
            (enrolled_list("shop\n"), false),
            (enrolled_list("bank\n"), true),
            (enrolled_list(""), true),
            (Ok(None), false),
            (unreadable(), false),
        ] {
            let what = format!("{enrolled:?}");
            let decide = decide(AgentUnavailable::Fail, enrolled, &"shop".parse().unwrap());
            assert_eq!(decide == Decision::Admit, admitted, "{what}: {decide:?}");
        }
    }

    #[test]
    fn a_node_may_be_configured_to_let_every_pod_start() {
        for enrolled in [enrolled_list("shop\n"), Ok(None)] {
            let decide = decide(AgentUnavailable::Allow, enrolled, &"shop".parse().unwrap());
            assert_eq!(decide, Decision::Admit);
        }
    }
}
