//! Expensive reviews delay no other review, and fit into the memory limit of the chart.

use std::{fs, path::Path, thread};

use serde_json::{Value, json};

use crate::kube::injector::{
    http::{JSON, posted, review},
    webhook::{Webhook, pod},
};

const CONCURRENT_REVIEWS: usize = 16;

/// The default of max_reviews.
const MAX_REVIEWS: usize = 4;

/// Returns the chart's memory limit for the injector in KiB.
fn memory_limit() -> u64 {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/helm/inpod/values.yaml");
    let text = fs::read_to_string(path).unwrap();
    let values: Value = serde_saphyr::from_str(&text).unwrap();
    let limit = values["injector"]["resources"]["limits"]["memory"].as_str();
    let mebibytes = limit.unwrap().strip_suffix("Mi").unwrap();
    mebibytes.parse::<u64>().unwrap() * 1024
}

/// Returns pods, each with the number of their reviews and a part of the answers.
fn expensive_pods() -> [(Value, usize, &'static str); 4] {
    let with = |field: &str, value: Value| {
        let mut pod = pod("expensive");
        pod["spec"][field] = value;
        pod
    };
    let volumes = (0..30_000).map(|number| json!({"name": format!("v{number}"), "emptyDir": {}}));
    let container = |field: &str, value: Value| json!([{"name": "istio-proxy", field: value}]);
    [
        (
            with("volumes", volumes.collect()),
            CONCURRENT_REVIEWS,
            "volumes has 30000 items, and the limit is 1000",
        ),
        (
            with("unknown", vec![0; 1_000_000].into()),
            CONCURRENT_REVIEWS,
            "values, and the limit is ",
        ),
        (
            with(
                "containers",
                container("unknown", vec![json!({"": 0}); 12_000].into()),
            ),
            MAX_REVIEWS,
            "JSONPatch",
        ),
        (
            with(
                "containers",
                container("image", "\"".repeat(950_000).into()),
            ),
            MAX_REVIEWS,
            "JSONPatch",
        ),
    ]
}

#[test]
fn expensive_reviews_delay_no_other_and_fit_into_memory() {
    let webhook = Webhook::start("limits");
    let usual = review(&pod("web"));
    let review_usual = || {
        let (status, answer) = posted(&webhook, "/inject", JSON, &usual);
        assert!(
            status == 200 && answer.contains("JSONPatch"),
            "{status} {answer}"
        );
    };
    for (pod, count, expected) in expensive_pods() {
        let body = review(&pod);
        thread::scope(|scope| {
            let post = || posted(&webhook, "/inject", JSON, &body);
            let expensive: Vec<_> = (0..count).map(|_| scope.spawn(post)).collect();
            while expensive.iter().any(|it| !it.is_finished()) {
                review_usual();
            }
            for it in expensive {
                let (status, answer) = it.join().unwrap();
                let start: String = answer.chars().take(300).collect();
                assert!(
                    status == 200 && answer.contains(expected),
                    "{status} {start}"
                );
            }
        });
    }
    review_usual();
    assert_eq!(webhook.counted("overloaded"), 0);
    let (peak, limit) = (webhook.peak_memory(), memory_limit());
    assert!(peak < limit, "{peak} KiB of {limit} KiB");
}
