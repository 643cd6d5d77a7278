//! Measures the cost of a review. The injector runs on one CPU and the callers on the others; they call over TLS like
//! the API server.

mod subject;

use std::{
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use nix::{
    sched::{CpuSet, sched_getaffinity, sched_setaffinity},
    unistd::Pid,
};
use serde_json::{Value, json};

use crate::{
    print_line,
    table::{Row, record, table},
};
use subject::{Caller, Subject};

const CALLERS: usize = 8;
const FOR: Duration = Duration::from_secs(5);

/// The environment of a large pod: 2,800 variables of 1,000 bytes, just below the API server's limit.
const VARIABLES: usize = 2800;

pub(crate) fn injector(samples: usize) -> anyhow::Result<()> {
    let subject = Subject::start(apart()?)?;
    let mut caller = subject.caller()?;
    let fresh = subject.resident()?;
    let (alone, wanted) = (review(&pod(0), false), review(&pod(0), true));
    let again = review(&injected(&mut caller, &wanted)?, true);
    let answer = caller.answer(&again)?;
    ensure!(answer.pointer("/response/patch").is_none(), "{answer}");
    let mut rows = [
        Row::new("a request that its status answers: HTTP and TLS alone"),
        Row::new("a review of a pod that is left alone"),
        Row::new("a review of a pod that is given a sidecar"),
        Row::new("a review of a pod that has it: nothing to change"),
    ];
    for _ in 0..samples {
        let times = [
            caller.nothing()?,
            caller.review(&alone)?,
            caller.review(&wanted)?,
            caller.review(&again)?,
        ];
        record(&mut rows, times);
    }
    table("The injector: one review at a time", &rows)?;
    let (alone_large, wanted_large) = (
        review(&pod(VARIABLES), false),
        review(&pod(VARIABLES), true),
    );
    let mut rows = [
        Row::new("a pod of 2.8 MB that is left alone"),
        Row::new("the same, given a sidecar"),
    ];
    for _ in 0..samples.min(50) {
        let times = [caller.review(&alone_large)?, caller.review(&wanted_large)?];
        record(&mut rows, times);
    }
    table(
        "The injector: a pod as large as the API server takes it",
        &rows,
    )?;
    for (what, body) in [
        ("pods that are left alone", alone),
        ("pods that are given a sidecar", wanted),
        ("pods that have it", again),
    ] {
        rate(&subject, what, &body)?;
    }
    print_line(&format!(
        "\nresident memory: {fresh} KiB at the start, {} KiB in the end",
        subject.resident()?
    ))
}

fn apart() -> anyhow::Result<usize> {
    let this = Pid::from_raw(0);
    let mine = sched_getaffinity(this)?;
    let mut all = (0..CpuSet::count()).filter(|cpu| mine.is_set(*cpu).unwrap_or(false));
    let theirs = all.next().context("a processor")?;
    let mut rest = CpuSet::new();
    for cpu in all {
        rest.set(cpu)?;
    }
    ensure!(
        rest != CpuSet::new(),
        "the injector's benchmark needs two processors"
    );
    sched_setaffinity(this, &rest)?;
    Ok(theirs)
}

/// Returns a pod with two containers and probes, as a Deployment creates pods.
fn pod(variables: usize) -> Value {
    let value = "x".repeat(1000);
    let env: Vec<_> = (0..variables)
        .map(|number| json!({"name": format!("V{number}"), "value": value}))
        .collect();
    let probe = |port: u16| json!({"httpGet": {"path": "/ready", "port": port, "scheme": "HTTP"}, "periodSeconds": 10});
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "generateName": "web-5d4f8c7b9-",
            "labels": {"app": "web", "version": "v1", "pod-template-hash": "5d4f8c7b9"},
            "ownerReferences": [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "web-5d4f8c7b9", "controller": true}],
        },
        "spec": {"serviceAccountName": "web", "containers": [
            {"name": "web", "image": "web:1", "env": env, "ports": [{"name": "http", "containerPort": 8080}], "readinessProbe": probe(8080), "livenessProbe": probe(8080)},
            {"name": "log", "image": "log:1", "readinessProbe": probe(9090)},
        ]},
    })
}

fn review(pod: &Value, is_wanted: bool) -> Vec<u8> {
    let mut pod = pod.clone();
    if let Some(labels) = pod
        .pointer_mut("/metadata/labels")
        .and_then(Value::as_object_mut)
    {
        let wanted = if is_wanted { "true" } else { "false" };
        labels.insert("sidecar.istio.io/inject".to_owned(), wanted.into());
    }
    let review = json!({
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "request": {"uid": "705ab4f5-6393-11e8-b7cc-42010a800002", "operation": "CREATE", "namespace": "shop", "resource": {"group": "", "version": "v1", "resource": "pods"}, "object": pod},
    });
    review.to_string().into_bytes()
}

fn injected(caller: &mut Caller, asked: &[u8]) -> anyhow::Result<Value> {
    let review: Value = serde_json::from_slice(asked)?;
    let mut pod = review.pointer("/request/object").context("a pod")?.clone();
    let answer = caller.answer(asked)?;
    let patch = answer.pointer("/response/patch").and_then(Value::as_str);
    subject::patch(&mut pod, patch.context("a patch")?)?;
    Ok(pod)
}

/// Measures reviews per second, and the CPU time of a review.
fn rate(subject: &Subject, what: &str, body: &[u8]) -> anyhow::Result<()> {
    let callers = (0..CALLERS).map(|_| subject.caller());
    let callers = callers.collect::<anyhow::Result<Vec<_>>>()?;
    let (before, began) = (subject.processor_time()?, Instant::now());
    let counts: Vec<_> = thread::scope(|scope| {
        let ask = |mut caller: Caller| {
            let mut count = 0_u32;
            while began.elapsed() < FOR {
                caller.review(body)?;
                count += 1;
            }
            anyhow::Ok(count)
        };
        let asking: Vec<_> = callers
            .into_iter()
            .map(|caller| scope.spawn(move || ask(caller)))
            .collect();
        let ended = asking.into_iter().map(thread::ScopedJoinHandle::join);
        ended.collect()
    });
    let (took, used) = (began.elapsed(), subject.processor_time()? - before);
    let mut count = 0;
    for counted in counts {
        count += counted.map_err(|_| anyhow::anyhow!("a caller ended"))??;
    }
    ensure!(count > 0, "no review was answered");
    let (rate, each) = (f64::from(count) / took.as_secs_f64(), used / count);
    let busy = used.as_secs_f64() / took.as_secs_f64() * 100.0;
    print_line(&format!(
        "\n{what}, {CALLERS} callers: {rate:.0} reviews a second; the injector's processor was busy for {busy:.0} % of the time, {} us for each",
        each.as_micros()
    ))
}
