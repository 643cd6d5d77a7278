//! Validates the annotations of a pod before the injection (services/docs/facts/istio-sidecar.md, 6.5). The node parses
//! lists with the same code.

use inpod_types::{keys, lists};
use serde_json::Value;

use crate::{
    error::{InjectError, excerpt, yaml_error},
    json, prometheus,
};

type Check = fn(&str) -> Result<(), String>;

/// All checks by annotation; the first failed check is reported.
const CHECKS: &[(&str, Check)] = &[
    (keys::INTERCEPTION_MODE, mode),
    (keys::STATUS_PORT, port),
    (keys::READINESS_DELAY, number),
    (keys::READINESS_PERIOD, number),
    (keys::READINESS_FAILURES, number),
    (keys::SIDECAR_INCLUDE_NETWORKS, all_or_networks),
    (keys::SIDECAR_EXCLUDE_NETWORKS, networks),
    (keys::SIDECAR_INCLUDE_INBOUND_PORTS, all_or_ports),
    (keys::SIDECAR_EXCLUDE_INBOUND_PORTS, ports),
    (keys::SIDECAR_EXCLUDE_OUTBOUND_PORTS, ports),
    (keys::SIDECAR_INCLUDE_OUTBOUND_PORTS, ports),
    (keys::SIDECAR_EXCLUDE_INTERFACES, interfaces),
    (keys::SIDECAR_KUBEVIRT_INTERFACES, interfaces),
    (keys::REROUTE_VIRTUAL_INTERFACES, interfaces),
    (keys::MERGE_METRICS, boolean),
    (keys::SCRAPE_TARGETS, targets),
    (keys::REWRITE_PROBES, boolean),
    (keys::NATIVE_SIDECAR, yes_or_no),
    (keys::PROXY_CONFIG, proxy_config),
    (keys::PROXY_CPU, quantity),
    (keys::PROXY_CPU_LIMIT, quantity),
    (keys::PROXY_MEMORY, quantity),
    (keys::PROXY_MEMORY_LIMIT, quantity),
    (keys::PROXY_IMAGE, image),
    (keys::PROXY_IMAGE_TYPE, identifier),
    (keys::LOG_LEVEL, identifier),
    (keys::COMPONENT_LOG_LEVEL, levels),
    (keys::AGENT_LOG_LEVEL, levels),
];

/// Validates all annotations that the injection or the node reads.
pub fn check(pod: &Value) -> Result<(), InjectError> {
    for (name, check) in CHECKS {
        if let Some(text) = json::annotation(pod, name) {
            check(text).map_err(|why| InjectError::invalid_annotation(name, &why))?;
        }
    }
    Ok(())
}

fn mode(text: &str) -> Result<(), String> {
    match text {
        "REDIRECT" | "TPROXY" | "NONE" => Ok(()),
        other => Err(format!(
            "{} is not a mode; use REDIRECT, TPROXY or NONE",
            excerpt(other)
        )),
    }
}

fn port(text: &str) -> Result<(), String> {
    let is_port = is_digits(text) && text.parse::<u16>().is_ok();
    require(is_port, text, "port", "a number up to 65535")
}

fn number(text: &str) -> Result<(), String> {
    let is_number = is_digits(text) && text.parse::<u32>().is_ok();
    require(is_number, text, "number", "digits only")
}

fn is_digits(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

fn require(is_so: bool, text: &str, what: &str, advice: &str) -> Result<(), String> {
    let why = || format!("{} is not a valid {what}; use {advice}", excerpt(text));
    is_so.then_some(()).ok_or_else(why)
}

fn ports(text: &str) -> Result<(), String> {
    let found = lists::ports(text);
    found.map(drop).map_err(|error| error.to_string())
}

fn all_or_ports(text: &str) -> Result<(), String> {
    if text == "*" { Ok(()) } else { ports(text) }
}

fn networks(text: &str) -> Result<(), String> {
    let found = lists::networks(text);
    found.map(drop).map_err(|error| error.to_string())
}

fn all_or_networks(text: &str) -> Result<(), String> {
    if text == "*" { Ok(()) } else { networks(text) }
}

fn interfaces(text: &str) -> Result<(), String> {
    let found = lists::interfaces(text);
    found.map(drop).map_err(|error| error.to_string())
}

fn targets(text: &str) -> Result<(), String> {
    prometheus::targets(text).map(drop)
}

fn boolean(text: &str) -> Result<(), String> {
    let is_boolean = json::parse_bool(text).is_some();
    require(is_boolean, text, "boolean", "true or false")
}

fn yes_or_no(text: &str) -> Result<(), String> {
    let is_one = matches!(text, "true" | "false");
    require(is_one, text, "boolean", "true or false")
}

/// Requires a YAML map, whose fields only Istio validates.
fn proxy_config(text: &str) -> Result<(), String> {
    let found: Result<Value, _> = serde_saphyr::from_str(text);
    let found = found.map_err(|error| format!("it is not valid YAML: {}", yaml_error(&error)))?;
    if found.is_object() || found.is_null() {
        return Ok(());
    }
    Err("it is not a YAML map such as {holdApplicationUntilProxyStarts: true}".to_owned())
}

/// Requires a quantity that is not negative (apimachinery, resource.Quantity): `1`, `0.5`, `100m`, `1Gi`, `1e3`.
fn quantity(text: &str) -> Result<(), String> {
    let end = text
        .find(|c: char| !(c.is_ascii_digit() || c == '.'))
        .unwrap_or(text.len());
    let (digits, unit) = text.split_at(end);
    let has_digit = digits.bytes().any(|byte| byte.is_ascii_digit());
    let is_plain = has_digit && digits.matches('.').count() <= 1;
    let suffixes = [
        "", "n", "u", "m", "k", "M", "G", "T", "P", "E", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei",
    ];
    let exponent = |unit: &str| {
        let digits = unit.strip_prefix(['e', 'E'])?;
        let digits = digits.strip_prefix(['+', '-']).unwrap_or(digits);
        (is_digits(digits) && digits.len() <= 3).then_some(())
    };
    let is_unit = suffixes.contains(&unit) || exponent(unit).is_some();
    require(
        is_plain && is_unit,
        text,
        "quantity",
        "one like 100m or 128Mi",
    )
}

/// Requires the name of an image, without white space and control characters.
fn image(text: &str) -> Result<(), String> {
    let is_image = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_graphic());
    require(is_image, text, "image", "one like registry/name:tag")
}

fn identifier(text: &str) -> Result<(), String> {
    let is_word = |byte: u8| byte.is_ascii_alphanumeric() || b"_.-".contains(&byte);
    let is_word = !text.is_empty() && text.bytes().all(is_word);
    require(is_word, text, "name", "letters, digits and _.- only")
}

fn levels(text: &str) -> Result<(), String> {
    let is_level = |byte: u8| byte.is_ascii_alphanumeric() || b"_.-:,".contains(&byte);
    let is_list = !text.is_empty() && text.bytes().all(is_level);
    require(
        is_list,
        text,
        "list of levels",
        "NAME:LEVEL, separated by commas",
    )
}

#[cfg(test)]
mod tests;
