//! Tests which spans are exported, and their content.

use std::{
    collections::BTreeSet,
    thread::sleep,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use http::{HeaderMap, HeaderValue};
use tracing::{info_span, subscriber::with_default};
use tracing_subscriber::layer::SubscriberExt as _;

use super::{wire::Value, *};
use crate::TRACEPARENT;

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const CALLER: &str = "00f067aa0ba902b7";
const PATH: &str = "/inpod.netconfig.v1.NetconfigService/ApplyRules";

fn trace(flags: &str) -> Trace {
    let mut headers = HeaderMap::new();
    let header = format!("00-{TRACE}-{CALLER}-{flags}");
    headers.insert(TRACEPARENT, HeaderValue::try_from(header).unwrap());
    Trace::from_headers(&headers)
}

/// Creates the span of a call as the server does.
fn call(caller: &Trace) -> Span {
    let span = info_span!("call", method = PATH, trace_id = caller.id());
    serve(&span, caller, PATH);
    span
}

/// Returns the exported spans in the order of their ends.
fn exported(work: impl FnOnce()) -> Vec<wire::Span> {
    let (layer, mut waiting) = test_layer();
    let subscriber = tracing_subscriber::registry().with(layer);
    with_default(subscriber, work);
    std::iter::from_fn(|| waiting.try_recv().ok()).collect()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn attribute<'a>(span: &'a wire::Span, key: &str) -> Option<&'a Value> {
    let values: Vec<_> = span.attributes.iter().filter(|it| it.key == key).collect();
    assert!(values.len() <= 1, "{key} is set more than once: {values:?}");
    values.first()?.value.as_ref()?.value.as_ref()
}

fn text(value: &str) -> Value {
    Value::Text(value.to_owned())
}

fn parent_of(trace: &Trace) -> String {
    trace
        .header()
        .unwrap()
        .split('-')
        .nth(2)
        .unwrap()
        .to_owned()
}

#[test]
fn a_call_is_a_span_of_its_callers_trace_below_its_callers_span() {
    let before = SystemTime::now();
    let spans = exported(|| drop(call(&trace("01"))));
    let [span] = &*spans else { panic!("{spans:?}") };
    assert_eq!(
        (hex(&span.trace_id), hex(&span.parent_span_id)),
        (TRACE.to_owned(), CALLER.to_owned())
    );
    assert!(span.span_id.len() == 8 && hex(&span.span_id) != CALLER);
    assert_eq!(
        (&*span.name, span.kind, span.flags),
        (&PATH[1..], wire::SERVER, 1)
    );
    let since = before.duration_since(UNIX_EPOCH).unwrap().as_nanos();
    assert!(u128::from(span.start_time_unix_nano) >= since);
    assert!(span.end_time_unix_nano >= span.start_time_unix_nano);
    assert_eq!(attribute(span, "method"), Some(&text(PATH)));
    assert_eq!(attribute(span, "trace_id"), None, "the span has it");
}

#[test]
fn what_is_made_within_a_call_is_below_it_and_no_two_spans_have_one_id() {
    let spans = exported(|| {
        let call = call(&trace("01"));
        let _within = call.enter();
        let outer = info_span!("outer");
        let _within = outer.enter();
        drop(info_span!("inner"));
    });
    let by_end: Vec<_> = spans.iter().map(|span| &*span.name).collect();
    assert_eq!(by_end, ["inner", "outer", &PATH[1..]]);
    for pair in spans.windows(2) {
        assert_eq!(pair[0].parent_span_id, pair[1].span_id);
        assert_eq!(pair[0].kind, wire::INTERNAL);
    }
    let ids: BTreeSet<_> = spans.iter().map(|span| &span.span_id).collect();
    assert_eq!(ids.len(), spans.len());
    assert!(spans.iter().all(|span| hex(&span.trace_id) == TRACE));
}

#[test]
fn what_is_asked_for_a_call_names_the_span_that_it_is_asked_in() {
    let caller = trace("01");
    let mut traces = Vec::new();
    let spans = exported(|| {
        traces.push(caller.clone().with_current_span());
        let in_call = {
            let call = call(&caller);
            let _within = call.enter();
            caller.clone().with_current_span()
        };
        // The work runs elsewhere in the process, such as in a pod's task.
        let part = child_span("claim", &in_call);
        traces.push(in_call.clone());
        let _within = part.enter();
        traces.push(in_call.with_current_span());
    });
    let [call, claim] = &*spans else {
        panic!("{spans:?}")
    };
    let parents: Vec<_> = traces.iter().map(parent_of).collect();
    assert_eq!(
        parents,
        [CALLER.to_owned(), hex(&call.span_id), hex(&claim.span_id)]
    );
    assert!(traces.iter().all(|trace| trace.id() == Some(TRACE)));
    assert_eq!(
        (&*claim.name, &claim.parent_span_id),
        ("claim", &call.span_id)
    );
}

#[test]
fn what_is_in_no_trace_or_in_one_that_is_not_sampled_is_not_exported() {
    let zeros = {
        let mut headers = HeaderMap::new();
        let header = format!("00-{TRACE}-{}-01", "0".repeat(16));
        headers.insert(TRACEPARENT, HeaderValue::try_from(header).unwrap());
        Trace::from_headers(&headers)
    };
    for caller in [Trace::default(), trace("00"), trace("02"), zeros] {
        let spans = exported(|| {
            let call = call(&caller);
            let _within = call.enter();
            drop(info_span!("inner"));
            drop(child_span("claim", &caller));
            assert_eq!(
                caller.clone().with_current_span(),
                caller,
                "it is passed on as it came"
            );
        });
        assert_eq!(spans, [], "{caller:?}");
    }
    assert_eq!(
        exported(|| drop(call(&trace("03")))).len(),
        1,
        "a flag that is not known"
    );
}

#[test]
fn a_call_for_another_trace_is_not_told_of_the_span_that_it_is_made_in() {
    let other = Trace::from_headers(&HeaderMap::from_iter([(
        http::HeaderName::from_static(TRACEPARENT),
        HeaderValue::try_from(format!("00-{}-{CALLER}-01", "a".repeat(32))).unwrap(),
    )]));
    exported(|| {
        let call = call(&trace("01"));
        let _within = call.enter();
        assert_eq!(other.clone().with_current_span(), other);
    });
}

#[test]
fn a_call_ends_with_its_answer_and_whatever_is_not_ok_is_an_error() {
    let mut answered = Duration::ZERO;
    let spans = exported(|| {
        for (code, name) in [(Code::Ok, "OK"), (Code::Aborted, "ABORTED")] {
            let call = call(&trace("01"));
            let open = call.in_scope(Call::current);
            open.end(code, name);
            answered = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
            // The client reads the body slowly, or a task continues.
            sleep(Duration::from_millis(20));
            drop((call, open));
        }
    });
    let [ok, aborted] = &*spans else {
        panic!("{spans:?}")
    };
    assert_eq!(ok.status, None);
    assert_eq!(
        attribute(ok, "rpc.grpc.status_code"),
        Some(&Value::Whole(0))
    );
    let status = aborted.status.as_ref().unwrap();
    assert_eq!((status.code, &*status.message), (wire::ERROR, "ABORTED"));
    assert_eq!(
        attribute(aborted, "rpc.grpc.status_code"),
        Some(&Value::Whole(10))
    );
    assert!(u128::from(aborted.end_time_unix_nano) <= answered.as_nanos());
}

#[test]
fn what_is_said_of_a_span_is_what_its_fields_and_its_work_say() {
    let spans = exported(|| {
        let call = call(&trace("01"));
        let _within = call.enter();
        let span = info_span!(
            "step",
            text = "t",
            whole = 3_u64,
            big = u64::MAX,
            debug = ?[1, 2],
            later = tracing::field::Empty,
        );
        span.record("later", true);
        let _within = span.enter();
        record_attribute("pod", &"first");
        record_attribute("pod", &"x".repeat(10_000));
    });
    let step = &spans[0];
    assert_eq!(attribute(step, "text"), Some(&text("t")));
    assert_eq!(attribute(step, "whole"), Some(&Value::Whole(3)));
    assert_eq!(attribute(step, "big"), Some(&text("18446744073709551615")));
    assert_eq!(attribute(step, "debug"), Some(&text("[1, 2]")));
    assert_eq!(attribute(step, "later"), Some(&Value::Bool(true)));
    assert_eq!(attribute(step, "pod"), Some(&text(&"x".repeat(256))));
}
