//! Encodes OTLP a second time, by hand, to check tags and types.

use super::*;

fn long(number: u8, content: &[u8]) -> Vec<u8> {
    [
        &head(number, 2),
        &[u8::try_from(content.len()).unwrap()][..],
        content,
    ]
    .concat()
}

fn small(number: u8, value: u8) -> Vec<u8> {
    [head(number, 0), vec![value]].concat()
}

fn head(number: u8, wire: u8) -> Vec<u8> {
    let tag = u16::from(number) << 3 | u16::from(wire);
    match u8::try_from(tag) {
        Ok(tag) if tag < 0x80 => vec![tag],
        _ => vec![
            u8::try_from(tag & 0x7f).unwrap() | 0x80,
            u8::try_from(tag >> 7).unwrap(),
        ],
    }
}

#[test]
fn a_span_has_its_fields_where_otlp_has_them() {
    let span = Span {
        trace_id: vec![1; 16],
        span_id: vec![2; 8],
        parent_span_id: vec![3; 8],
        name: "n".to_owned(),
        kind: SERVER,
        start_time_unix_nano: 0x0807_0605_0403_0201,
        end_time_unix_nano: 9,
        attributes: vec![KeyValue::new("k", Value::Whole(5))],
        status: Some(Status {
            message: "m".to_owned(),
            code: ERROR,
        }),
        flags: 1,
    };
    let value = long(2, &small(3, 5));
    let expected = [
        long(1, &[1; 16]),
        long(2, &[2; 8]),
        long(4, &[3; 8]),
        long(5, b"n"),
        small(6, 2),
        [head(7, 1), vec![1, 2, 3, 4, 5, 6, 7, 8]].concat(),
        [head(8, 1), vec![9, 0, 0, 0, 0, 0, 0, 0]].concat(),
        long(9, &[long(1, b"k"), value].concat()),
        long(15, &[long(2, b"m"), small(3, 2)].concat()),
        [head(16, 5), vec![1, 0, 0, 0]].concat(),
    ];
    assert_eq!(span.encode_to_vec(), expected.concat());
}

#[test]
fn a_request_has_its_fields_where_otlp_has_them() {
    let request = ExportRequest {
        resource_spans: vec![ResourceSpans {
            resource: Some(Resource {
                attributes: vec![KeyValue::new("k", Value::Text("v".to_owned()))],
            }),
            scope_spans: vec![ScopeSpans {
                scope: Some(Scope {
                    name: "s".to_owned(),
                    version: "1".to_owned(),
                }),
                spans: vec![Span {
                    name: "n".to_owned(),
                    ..Span::default()
                }],
            }],
        }],
    };
    let attribute = [long(1, b"k"), long(2, &long(1, b"v"))].concat();
    let resource = long(1, &long(1, &attribute));
    let scope = long(1, &[long(1, b"s"), long(2, b"1")].concat());
    let spans = long(2, &[scope, long(2, &long(5, b"n"))].concat());
    let expected = long(1, &[resource, spans].concat());
    assert_eq!(request.encode_to_vec(), expected);
}

#[test]
fn values_of_every_kind_have_their_places() {
    for (value, expected) in [
        (Value::Text("v".to_owned()), long(1, b"v")),
        (Value::Bool(true), small(2, 1)),
        (Value::Whole(7), small(3, 7)),
        (
            Value::Number(1.0),
            [head(4, 1), 1.0_f64.to_le_bytes().to_vec()].concat(),
        ),
    ] {
        let value = AnyValue { value: Some(value) };
        assert_eq!(value.encode_to_vec(), expected);
    }
}

#[test]
fn what_was_not_taken_is_read() {
    let answer = long(1, &[small(1, 3), long(2, b"why")].concat());
    let partial = ExportResponse::decode(&*answer).unwrap().partial_success;
    let partial = partial.unwrap();
    assert_eq!(
        (partial.rejected_spans, &*partial.error_message),
        (3, "why")
    );
    assert_eq!(
        ExportResponse::decode(&[][..]).unwrap().partial_success,
        None
    );
}
