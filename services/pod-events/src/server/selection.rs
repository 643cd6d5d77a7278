//! Selectors and filters of pods in requests.

use inpod_proto::{Invalid, podevents::v1 as wire, types::v1 as types};
use inpod_types::{NamespaceName, PodName, PodUid};

use super::parse_field;
use crate::{explain::PodInfo, pod::PodKey};

/// Selects pods by namespace, name and UID. An absent part matches any pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Selection {
    pub(super) namespace: Option<NamespaceName>,
    pub(super) name: Option<PodName>,
    pub(super) uid: Option<PodUid>,
}

fn non_empty(text: String) -> Option<String> {
    Some(text).filter(|text| !text.is_empty())
}

impl Selection {
    pub(super) fn parse(selector: Option<types::PodSelector>) -> Result<Self, Invalid> {
        let types::PodSelector {
            namespace,
            name,
            uid,
        } = selector.unwrap_or_default();
        let namespace = non_empty(namespace).map(|it| parse_field("pod.namespace", &it));
        let name = non_empty(name).map(|it| parse_field("pod.name", &it));
        let uid = non_empty(uid).map(|it| parse_field("pod.uid", &it));
        Ok(Self {
            namespace: namespace.transpose()?,
            name: name.transpose()?,
            uid: uid.transpose()?,
        })
    }

    /// Returns whether the selection names a pod, which has to exist then.
    pub(super) fn names_pod(&self) -> bool {
        self.name.is_some() || self.uid.is_some()
    }

    pub(super) fn matches_key(&self, (namespace, name): &PodKey) -> bool {
        self.namespace.as_ref().is_none_or(|it| it == namespace)
            && self.name.as_ref().is_none_or(|it| it == name)
    }

    /// Returns whether the UID matches the pod. For a static pod, the hash counts, too.
    pub(super) fn matches(&self, known: &PodInfo) -> bool {
        self.uid.as_ref().is_none_or(|uid| known.has_uid(uid))
    }
}

#[derive(Clone, Debug, Default)]
pub(super) struct Filter {
    pub(super) selection: Selection,
    states: Vec<i32>,
    desired: Vec<i32>,
    amiss: bool,
    let_through: bool,
}

impl Filter {
    pub(super) fn parse(request: wire::ListPodsRequest) -> Result<Self, Invalid> {
        let is_state = |number: &i32| *number != 0 && wire::PodState::is_valid(*number);
        let is_enrollment = |number: &i32| *number != 0 && types::Enrollment::is_valid(*number);
        if !request.states.iter().all(is_state) {
            return Err(Invalid::new("states", "unknown state"));
        }
        if !request.desired.iter().all(is_enrollment) {
            return Err(Invalid::new("desired", "unknown enrollment"));
        }
        Ok(Self {
            selection: Selection::parse(request.pod)?,
            states: request.states,
            desired: request.desired,
            amiss: request.amiss,
            let_through: request.let_through,
        })
    }

    pub(super) fn matches(&self, pod: &wire::PodSummary) -> bool {
        let among = |all: &[i32], one: i32| all.is_empty() || all.contains(&one);
        among(&self.states, pod.state)
            && among(&self.desired, pod.desired)
            && (!self.amiss || pod.last_failure.is_some() || pod.let_through)
            && (!self.let_through || pod.let_through)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn selector(namespace: &str, name: &str, uid: &str) -> Option<types::PodSelector> {
        let [namespace, name, uid] = [namespace, name, uid].map(str::to_owned);
        Some(types::PodSelector {
            namespace,
            name,
            uid,
        })
    }

    #[test]
    fn an_absent_part_of_a_selector_matches_any() {
        let key = ("shop".parse().unwrap(), "web".parse().unwrap());
        for (namespace, name, matches) in [
            ("", "", true),
            ("shop", "", true),
            ("", "web", true),
            ("shop", "web", true),
            ("bank", "", false),
            ("shop", "db", false),
        ] {
            let selection = Selection::parse(selector(namespace, name, "")).unwrap();
            assert_eq!(selection.matches_key(&key), matches, "{namespace}/{name}");
        }
        assert_eq!(Selection::parse(None).unwrap(), Selection::default());
    }

    fn filter(change: impl FnOnce(&mut wire::ListPodsRequest)) -> Result<Filter, Invalid> {
        let mut request = wire::ListPodsRequest::default();
        change(&mut request);
        Filter::parse(request)
    }

    #[test]
    fn each_filter_narrows_what_the_others_leave() {
        let refused = wire::PodSummary {
            state: wire::PodState::Out.into(),
            desired: types::Enrollment::Ambient.into(),
            last_failure: Some(types::Failure::default()),
            ..wire::PodSummary::default()
        };
        let through = wire::PodSummary {
            state: wire::PodState::Out.into(),
            desired: types::Enrollment::Unknown.into(),
            let_through: true,
            ..wire::PodSummary::default()
        };
        type Change = fn(&mut wire::ListPodsRequest);
        let filters: [(Change, bool, bool); 6] = [
            (|_| (), true, true),
            (|it| it.amiss = true, true, true),
            (|it| it.let_through = true, false, true),
            (|it| it.states = vec![3], false, false),
            (|it| it.states = vec![3, 1], true, true),
            (|it| it.desired = vec![2], true, false),
        ];
        for (index, (change, of_refused, of_through)) in filters.into_iter().enumerate() {
            let filter = filter(change).unwrap();
            let matches = (filter.matches(&refused), filter.matches(&through));
            assert_eq!(matches, (of_refused, of_through), "filter {index}");
        }
    }

    #[test]
    fn invalid_fields_of_a_filter_are_named() {
        let field = |change: &dyn Fn(&mut wire::ListPodsRequest)| {
            filter(change).unwrap_err().field().to_owned()
        };
        for unknown in [0, 99, -1] {
            assert_eq!(field(&|it| it.states = vec![unknown]), "states");
            assert_eq!(field(&|it| it.desired = vec![1, unknown]), "desired");
        }
        assert_eq!(field(&|it| it.pod = selector("", "", "-")), "pod.uid");
    }
}
