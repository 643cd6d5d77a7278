use std::sync::Mutex;

use inpod_types::Reason;

use super::*;
use crate::{labels::Selector, pod::Pod, testing};

fn ztunnel(name: &str) -> Pod {
    let mut pod = testing::pod("istio-system", name);
    pod.labels.insert("app".to_owned(), "ztunnel".to_owned());
    pod
}

fn selector() -> Selector {
    "istio-system/app=ztunnel".parse().unwrap()
}

fn inventory(pods: &[Pod]) -> Arc<Inventory> {
    let key = |pod: &Pod| (pod.pod.namespace.clone(), pod.pod.name.clone());
    Arc::new(Inventory {
        pods: pods.iter().map(|pod| (key(pod), pod.clone())).collect(),
        ..Inventory::default()
    })
}

fn names(uids: &BTreeSet<PodUid>) -> Vec<&str> {
    uids.iter().map(PodUid::as_str).collect()
}

#[test]
fn ztunnels_are_the_pods_of_the_namespace_with_the_label() {
    let elsewhere = Pod {
        labels: ztunnel("c").labels,
        ..testing::pod("shop", "c")
    };
    let mut other = ztunnel("d");
    other.labels.insert("app".to_owned(), "istiod".to_owned());
    // The cgroup of a static pod has the hash in its name.
    let static_pod = Pod {
        runtime_uid: Some("hash".parse().unwrap()),
        ..ztunnel("b")
    };
    let plain = testing::pod("istio-system", "e");
    let pods = [ztunnel("a"), static_pod, elsewhere, other.clone(), plain];
    let mut ztunnels = ZtunnelPods::default();
    let found = ztunnels.update(inventory(&pods), &selector());
    assert_eq!(names(&found), ["hash", "uid-of-a"]);
    other.labels.insert("app".to_owned(), "ztunnel".to_owned());
    let found = ztunnels.update(inventory(&[ztunnel("a"), other]), &selector());
    assert_eq!(names(&found), ["uid-of-a", "uid-of-d"]);
    assert_eq!(ztunnels.update(inventory(&[]), &selector()), [].into());
}

#[test]
fn a_selector_is_a_namespace_a_label_and_a_value() {
    for text in ["mesh/app.kubernetes.io/name=z_t.1", "a/b=c"] {
        assert!(text.parse::<Selector>().is_ok(), "{text}");
    }
    let long = format!("a/b={}", "c".repeat(64));
    for text in [
        "",
        "a/b",
        "b=c",
        "a/b=",
        "a/=c",
        "a/b=c=d",
        "a/b=c,d=e",
        "a/b = c",
        "A/b=c",
        "/b=c",
        "a/B.c/d=e",
        "a/b/c/d=e",
        "a/-b=c",
        "a/b=c-",
        &long,
    ] {
        let error = text.parse::<Selector>().unwrap_err();
        assert!(
            error.contains("ztunnel_pods") && error.contains(text),
            "{error}"
        );
    }
}

/// Simulates the source and the broker, and records the updates that the broker receives. The broker refuses the first
/// `fails` updates.
struct Fixture {
    inventory: watch::Sender<Arc<Inventory>>,
    health: watch::Sender<Health>,
    broker: watch::Sender<Instance>,
    sent: Arc<Mutex<(Vec<String>, u32)>>,
}

impl Fixture {
    fn new(fails: u32) -> Self {
        let (inventory, seen_inventory) = watch::channel(inventory(&[]));
        let (health, seen_health) = watch::channel(None);
        let (broker, seen_broker) = watch::channel(None);
        let sent = Arc::new(Mutex::new((Vec::new(), fails)));
        let inputs = Inputs {
            inventory: seen_inventory,
            health: seen_health,
            broker: seen_broker,
        };
        let log = Arc::clone(&sent);
        tokio::spawn(async move {
            let set = |run: Arc<str>, pods: BTreeSet<PodUid>| {
                let mut log = log.lock().unwrap();
                std::future::ready(if log.1 == 0 {
                    log.0.push(format!("{run}: {}", names(&pods).join(" ")));
                    Ok(())
                } else {
                    log.1 -= 1;
                    Err(Failure::new(Reason::InstanceMismatch, "another run"))
                })
            };
            inputs.run(&selector(), set).await;
        });
        Self {
            inventory,
            health,
            broker,
            sent,
        }
    }

    /// Returns all sent updates once nothing more happens.
    async fn sent(&self) -> Vec<String> {
        sleep(Duration::from_secs(60)).await;
        self.sent.lock().unwrap().0.clone()
    }
}

#[tokio::test(start_paused = true)]
async fn nothing_is_sent_before_the_pods_are_known() {
    let fixture = Fixture::new(0);
    fixture.broker.send_replace(Some("r1".into()));
    for health in [None, Some(Err("the API server is away".to_owned()))] {
        fixture.health.send_replace(health);
        assert!(fixture.sent().await.is_empty());
    }
    fixture.inventory.send_replace(inventory(&[ztunnel("a")]));
    fixture.health.send_replace(Some(Ok(())));
    assert_eq!(fixture.sent().await, ["r1: uid-of-a"]);
    // An unavailable source does not invalidate the known pods.
    fixture.health.send_replace(Some(Err("away".to_owned())));
    fixture.broker.send_replace(Some("r2".into()));
    assert_eq!(fixture.sent().await, ["r1: uid-of-a", "r2: uid-of-a"]);
}

#[tokio::test(start_paused = true)]
async fn every_run_of_the_broker_gets_the_list_and_every_change_once() {
    let fixture = Fixture::new(0);
    let set_pods = |pods: &[Pod]| fixture.inventory.send_replace(inventory(pods));
    fixture.health.send_replace(Some(Ok(())));
    assert!(fixture.sent().await.is_empty(), "there is no broker");
    fixture.broker.send_replace(Some("r1".into()));
    assert_eq!(fixture.sent().await, ["r1: "]);
    set_pods(&[testing::pod("shop", "web")]);
    assert_eq!(fixture.sent().await, ["r1: "]);
    set_pods(&[ztunnel("a")]);
    assert_eq!(fixture.sent().await[1..], ["r1: uid-of-a"]);
    fixture.broker.send_replace(None);
    set_pods(&[ztunnel("a"), ztunnel("b")]);
    assert_eq!(fixture.sent().await.len(), 2);
    fixture.broker.send_replace(Some("r2".into()));
    assert_eq!(fixture.sent().await[2..], ["r2: uid-of-a uid-of-b"]);
}

#[tokio::test(start_paused = true)]
async fn an_update_that_the_broker_refuses_is_retried() {
    let fixture = Fixture::new(5);
    fixture.health.send_replace(Some(Ok(())));
    fixture.inventory.send_replace(inventory(&[ztunnel("a")]));
    fixture.broker.send_replace(Some("r1".into()));
    assert_eq!(fixture.sent().await, ["r1: uid-of-a"]);
}
