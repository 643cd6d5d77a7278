//! Pods for unit tests.

use inpod_types::PodRef;

use crate::pods::Pod;

pub(crate) fn pod(name: &str) -> Pod {
    Pod {
        pod: PodRef {
            namespace: "shop".parse().unwrap(),
            name: name.parse().unwrap(),
            uid: format!("uid-of-{name}").parse().unwrap(),
        },
        version: "7".to_owned(),
        label: None,
        is_ending: false,
        failed_init: None,
        is_in_mesh: false,
    }
}
