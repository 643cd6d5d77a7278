//! Determines a pod's redirection from its annotations, and reports requested settings that are not permitted.

use std::sync::Arc;

use inpod_types::{Enrollment, Failure, Reason, SandboxRef};

use super::{Shared, Task};
use crate::{
    checkpoint::Record,
    inventory::Inventory,
    pod::{Pod, PodKey},
    redirection::{
        Malformed, Permissions, PrivilegedRequest, Redirection, RequestedSettings, granted,
    },
    status::EventKind,
};

/// Returns true if the node permits all requested settings, or the namespace is known.
pub(crate) fn is_permission_known(inventory: &Inventory, pod: &Pod, pods_may: Permissions) -> bool {
    let is_permitted = |request: PrivilegedRequest| pods_may.include(request.needs);
    pod.requested.privileged().all(is_permitted)
        || !inventory.is_namespace_unknown(&pod.pod.namespace)
}

fn permitted_settings(
    inventory: &Inventory,
    pod: &Pod,
    pods_may: Permissions,
) -> Result<RequestedSettings, Failure> {
    if !is_permission_known(inventory, pod, pods_may) {
        let message = format!(
            "it is not known what namespace {} permits its pods",
            pod.pod.namespace
        );
        return Err(Failure::new(Reason::NamespaceUnknown, message).at_field("pod.namespace"));
    }
    let namespace = inventory.namespace(&pod.pod.namespace);
    granted(&pod.requested, namespace.allows, pods_may).map_err(|malformed| invalid(&malformed))
}

fn invalid(malformed: &Malformed) -> Failure {
    let failure = Failure::new(Reason::InvalidField, malformed.to_string());
    failure.at_field(malformed.annotation)
}

/// Determines the redirection with which a sandbox is enrolled.
///
/// The applied redirection stays while the new redirection is unknown or malformed, or would switch between ztunnel and
/// sidecar. Otherwise a malformed annotation is an error, and settings with unknown permission are left out.
fn effective_redirection(
    requested: Result<Redirection, Failure>,
    applied: Option<&Redirection>,
    pod: &Pod,
    pods_may: Permissions,
) -> Result<Redirection, Failure> {
    match (requested, applied) {
        (Err(_), Some(applied)) => Ok(applied.clone()),
        (Ok(requested), Some(applied)) if requested.is_sidecar() != applied.is_sidecar() => {
            Ok(applied.clone())
        }
        (Err(failure), None) if failure.reason == Reason::NamespaceUnknown => {
            let granted = granted(&pod.requested, Permissions::default(), pods_may);
            granted.map(Redirection::Ambient).map_err(|_| failure)
        }
        (requested, _) => requested,
    }
}

impl Shared {
    /// Returns the permitted settings. Fails like [`Self::redirection_of`].
    fn settings_of(&self, pod: &Pod) -> Result<RequestedSettings, Failure> {
        let inventory = self.source.inventory();
        permitted_settings(&inventory, pod, self.config.pods_may())
    }

    /// Returns a pod's redirection.
    ///
    /// # Errors
    ///
    /// INVALID_FIELD if an annotation that counts is malformed, NAMESPACE_UNKNOWN if the permissions are not known.
    /// An enrolled pod keeps its redirection then.
    pub fn redirection_of(&self, pod: &Pod) -> Result<Redirection, Failure> {
        self.redirection_for(pod, self.decide(pod).enrollment)
    }

    pub fn redirection_for(
        &self,
        pod: &Pod,
        enrollment: Enrollment,
    ) -> Result<Redirection, Failure> {
        match &pod.injection {
            Some(injection) if enrollment == Enrollment::Sidecar => {
                let sidecar = injection.sidecar().map_err(invalid)?;
                Ok(Redirection::Sidecar(Box::new(sidecar.clone())))
            }
            Some(_) | None => self.settings_of(pod).map(Redirection::Ambient),
        }
    }

    /// Emits an Event that lists requested settings without permission.
    pub(super) fn report_not_permitted(&self, key: &PodKey, record: &Record) {
        let inventory = self.source.inventory();
        let Some(pod) = inventory.pod(key).filter(|pod| record.belongs_to(pod)) else {
            return;
        };
        let namespace = inventory.namespace(&pod.pod.namespace);
        let permitted = namespace.allows.or(self.config.pods_may());
        let request = pod.requested.privileged();
        let refused = request.filter(|request| !permitted.include(request.needs));
        let refused: Vec<_> = refused.map(|request| request.annotation).collect();
        if !refused.is_empty() {
            let message = format!("Not permitted and left out: {}", refused.join(", "));
            let status = &self.status;
            status.event(&pod.pod, EventKind::Warning, Reason::NotPermitted, &message);
        }
    }
}

impl Task {
    /// Refuses malformed permitted annotations. A pod in the mesh keeps its redirection instead.
    pub(super) fn reject_malformed(
        &mut self,
        sandbox: &SandboxRef,
        pod: &Pod,
        enrollment: Enrollment,
    ) -> Result<(), Failure> {
        let known = self.index_of(sandbox).and_then(|at| self.records.get(at));
        let applied = known.is_some_and(|record| record.intent.was_in_mesh());
        match self.shared.redirection_for(pod, enrollment) {
            Err(failure) if failure.reason == Reason::InvalidField && !applied => {
                self.failure = Some(failure.clone());
                Err(failure)
            }
            Ok(_) | Err(_) => Ok(()),
        }
    }

    /// Updates the current record with the redirection for the enrollment.
    pub(super) fn update_redirection(&mut self) -> Result<(), Failure> {
        let inventory = self.shared.source.inventory();
        let Some(record) = self.records.last_mut().map(Arc::make_mut) else {
            return Ok(());
        };
        let Some(pod) = inventory
            .pod(&self.key)
            .filter(|pod| record.belongs_to(pod))
        else {
            return Ok(());
        };
        let enrollment = self.shared.decide(pod).enrollment;
        if !matches!(enrollment, Enrollment::Ambient | Enrollment::Sidecar) {
            // An ADD completes the decision from its beginning.
            return Ok(());
        }
        let requested = self.shared.redirection_for(pod, enrollment);
        if let Err(failure) = &requested {
            self.timeline.note(failure.to_string());
        }
        let applied = record.intent.was_in_mesh().then_some(&record.redirection);
        record.redirection =
            effective_redirection(requested, applied, pod, self.shared.config.pods_may())?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use inpod_types::keys;

    use super::*;
    use crate::{
        redirection::Requested,
        testing::{namespace, pod},
    };

    fn asking(ports: &str) -> Pod {
        let annotation = (keys::EXCLUDE_OUTBOUND_PORTS.to_owned(), ports.to_owned());
        Pod {
            requested: Requested::from_annotations(Some(&[annotation].into())),
            ..pod("shop", "web")
        }
    }

    /// Returns an inventory whose namespace grants the named permissions, or is unknown if `None`.
    fn permitting(names: Option<&str>) -> Inventory {
        let mut inventory = Inventory {
            namespaces_required: true,
            ..Inventory::default()
        };
        if let Some(names) = names {
            let mut namespace = namespace("shop");
            namespace.allows = Permissions::parse(names);
            inventory
                .namespaces
                .insert(namespace.name.clone(), namespace);
        }
        inventory
    }

    fn ports(settings: &RequestedSettings) -> usize {
        settings.exclusions.outbound_ports.len()
    }

    fn ports_of(redirection: &Redirection) -> usize {
        match redirection {
            Redirection::Ambient(settings) => ports(settings),
            Redirection::Sidecar(_) => usize::MAX,
        }
    }

    #[test]
    fn a_grant_is_unknown_only_where_the_namespace_would_decide_and_is_not_known() {
        let of = |namespace, node, pod: &Pod| {
            permitted_settings(&permitting(namespace), pod, Permissions::parse(node))
        };
        let requested = asking("80");
        assert_eq!(ports(&of(Some("exclude"), "", &requested).unwrap()), 1);
        assert_eq!(ports(&of(Some(""), "", &requested).unwrap()), 0);
        assert_eq!(ports(&of(None, "exclude", &requested).unwrap()), 1);
        assert_eq!(ports(&of(None, "", &pod("shop", "web")).unwrap()), 0);
        let unknown = of(None, "keep-existing", &requested).unwrap_err();
        assert_eq!(unknown.reason, Reason::NamespaceUnknown);
    }

    #[test]
    fn what_is_applied_stays_and_what_is_not_is_refused_or_left_out() {
        let applied = permitted_settings(
            &permitting(Some("exclude")),
            &asking("80,443"),
            Permissions::default(),
        )
        .unwrap();
        let applied = Redirection::Ambient(applied);
        let updated = |namespace, ports, applied: Option<&Redirection>| {
            let (pod, node) = (asking(ports), Permissions::default());
            let requested = permitted_settings(&permitting(namespace), &pod, node);
            effective_redirection(requested.map(Redirection::Ambient), applied, &pod, node)
        };
        let malformed = updated(Some("exclude"), "http", Some(&applied)).unwrap();
        assert_eq!(malformed, applied);
        let unknown = updated(None, "80", Some(&applied)).unwrap();
        assert_eq!(unknown, applied);
        let withdrawn = updated(Some(""), "80,443", Some(&applied)).unwrap();
        assert_eq!(ports_of(&withdrawn), 0);
        let refused = updated(Some("exclude"), "http", None).unwrap_err();
        assert_eq!(refused.reason, Reason::InvalidField);
        assert_eq!(refused.field, keys::EXCLUDE_OUTBOUND_PORTS);
        assert_eq!(ports_of(&updated(None, "80", None).unwrap()), 0);
        assert_eq!(ports_of(&updated(None, "http", None).unwrap()), 0);
    }
}
