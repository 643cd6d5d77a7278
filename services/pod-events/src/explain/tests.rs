use super::*;
use crate::testing;

pub(super) fn running_pod(enrollment: Enrollment, records: Vec<Record>) -> PodInfo {
    let mut shown = testing::pod("shop", "web");
    shown.addresses = testing::record("c1").addresses;
    let (pod, key) = (
        shown.pod.clone(),
        (shown.pod.namespace.clone(), shown.pod.name.clone()),
    );
    let mut inventory = Inventory::default();
    inventory.pods.insert(key.clone(), shown);
    let mut view = View::default();
    view.records = records.into_iter().map(Arc::new).collect();
    PodInfo {
        pod,
        key,
        decision: Decision {
            enrollment,
            reason: Reason::LabelOnPod,
            demand: Demand::None,
        },
        view,
        inventory: Arc::new(inventory),
        wait: None,
    }
}
