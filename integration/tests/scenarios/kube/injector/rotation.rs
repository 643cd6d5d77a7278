//! A certificate that changes while pods are created.

use std::{
    sync::atomic::{AtomicBool, AtomicU32, Ordering},
    thread,
    time::Duration,
};

use anyhow::ensure;
use integration::eventually;
use serde_json::json;

use crate::kube::injector::{
    ENABLED,
    webhook::{TIMEOUT, Webhook, pod},
};

/// Returns the serial of the certificate in a new handshake.
fn serial(webhook: &Webhook) -> anyhow::Result<String> {
    let text = webhook.curl(&["-k", "-o", "/dev/null", "-w", "%{certs}", &webhook.url("/")])?;
    let line = text.lines().find(|line| line.starts_with("Serial Number:"));
    ensure!(line.is_some(), "no serial number in {text}");
    Ok(line.unwrap_or_default().to_owned())
}

#[test]
fn no_review_is_lost_while_the_certificate_changes() {
    let webhook = Webhook::start("rotation");
    let inside = webhook.namespace("in", Some(ENABLED));
    webhook.register(&json!([webhook.hook("namespace", "/inject", "Fail")]));
    webhook.until_injected(&inside);
    let first = serial(&webhook).unwrap();
    assert_eq!(webhook.expiration(), webhook.written_expiration());
    let (done, made) = (AtomicBool::new(false), AtomicU32::new(0));
    thread::scope(|scope| {
        let makers: Vec<_> = (0..2)
            .map(|_| {
                scope.spawn(|| {
                    while !done.load(Ordering::Relaxed) {
                        let made_now = webhook.dry_run(&inside, &pod("web")).unwrap();
                        assert_eq!(crate::kube::injector::containers(&made_now).len(), 2);
                        made.fetch_add(1, Ordering::Relaxed);
                    }
                })
            })
            .collect();
        for number in 2..=5 {
            webhook.rotate(number, 2 * number);
            let wanted = format!("{number:02x}");
            let seen = eventually("the new certificate is shown", TIMEOUT, || {
                let serial = serial(&webhook)?;
                ensure!(serial.ends_with(&wanted), "{serial}");
                anyhow::Ok(())
            });
            // The creating thread's error has more detail.
            if seen.is_err() {
                done.store(true, Ordering::Relaxed);
            }
            seen.unwrap();
            thread::sleep(Duration::from_millis(200));
        }
        done.store(true, Ordering::Relaxed);
        makers.into_iter().for_each(|maker| maker.join().unwrap());
    });
    assert_ne!(serial(&webhook).unwrap(), first);
    assert_eq!(webhook.expiration(), webhook.written_expiration());
    assert!(made.load(Ordering::Relaxed) > 20, "{made:?}");
    assert_eq!(webhook.counted("failed") + webhook.counted("overloaded"), 0);
}
