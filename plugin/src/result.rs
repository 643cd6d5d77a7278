//! Reads the results of other plugins and prints the plugin's own (CNI spec, "Success").

use std::net::IpAddr;

use inpod_types::IfName;
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::value::RawValue;

use crate::{config::NetworkConfig, error::CniError, version::SpecVersion};

/// The fields have the same form from 0.3.0 to 1.1.0, except that each entry of `ips` has a `version` in 0.x.
#[derive(Deserialize)]
struct PrevResult {
    #[serde(default)]
    interfaces: Option<Vec<Interface>>,
    #[serde(default)]
    ips: Option<Vec<Address>>,
}

#[derive(Deserialize)]
struct Interface {
    #[serde(default)]
    name: String,
    #[serde(default)]
    sandbox: Option<String>,
}

#[derive(Deserialize)]
struct Address {
    address: String,
    /// An index into `interfaces`, or -1 from some IPAM plugins if there is none.
    #[serde(default)]
    interface: Option<i64>,
}

/// A result of 0.1.0 or 0.2.0, which has no interfaces, and at most one address of each family.
#[derive(Deserialize)]
struct LegacyResult {
    #[serde(default)]
    ip4: Option<LegacyAddress>,
    #[serde(default)]
    ip6: Option<LegacyAddress>,
}

#[derive(Deserialize)]
struct LegacyAddress {
    ip: String,
}

/// Returns the addresses of the interface in the sandbox without prefix length, or all addresses if the result assigns
/// none to the interface. Without a prevResult, the list is empty.
///
/// # Errors
///
/// Fails with code 7 if `prevResult` is not a result or has an invalid address.
pub fn addresses(config: &NetworkConfig, ifname: &IfName) -> Result<Vec<IpAddr>, CniError> {
    let Some(raw) = &config.prev_result else {
        return Ok(Vec::new());
    };
    if config.version < SpecVersion::V0_3_0 {
        return legacy_addresses(parse_result(raw)?);
    }
    let result: PrevResult = parse_result(raw)?;
    let all = result.ips.unwrap_or_default();
    let ours = sandbox_interface_indices(&result.interfaces.unwrap_or_default(), ifname);
    let is_ours = |ip: &&Address| ip.interface.is_some_and(|index| ours.contains(&index));
    let mut chosen: Vec<&Address> = all.iter().filter(is_ours).collect();
    if chosen.is_empty() {
        chosen.extend(&all);
    }
    chosen
        .into_iter()
        .map(|ip| parse_cidr("ips", &ip.address))
        .collect()
}

fn legacy_addresses(result: LegacyResult) -> Result<Vec<IpAddr>, CniError> {
    let keys = [("ip4", result.ip4), ("ip6", result.ip6)];
    keys.into_iter()
        .filter_map(|(key, address)| Some((key, address?)))
        .map(|(key, address)| parse_cidr(key, &address.ip))
        .collect()
}

fn parse_result<T: DeserializeOwned>(raw: &RawValue) -> Result<T, CniError> {
    serde_json::from_str(raw.get()).map_err(|error| CniError::in_config("prevResult", error))
}

/// Considers only interfaces in the sandbox, because the host's end of a veth pair may have the same name.
fn sandbox_interface_indices(interfaces: &[Interface], ifname: &IfName) -> Vec<i64> {
    let is_ours = |interface: &Interface| {
        let in_sandbox = interface.sandbox.as_ref().is_some_and(|it| !it.is_empty());
        in_sandbox && interface.name == ifname.as_str()
    };
    let numbered = (0..).zip(interfaces);
    numbered
        .filter(|(_, interface)| is_ours(interface))
        .map(|(index, _)| index)
        .collect()
}

fn parse_cidr(key: &str, cidr: &str) -> Result<IpAddr, CniError> {
    let (address, _prefix) = cidr.split_once('/').unwrap_or((cidr, ""));
    inpod_types::parse_address(address)
        .map_err(|error| CniError::in_config("prevResult", format_args!("{key}: {error}")))
}

/// Returns the prevResult byte for byte, or an empty result without one: a chained plugin that changes nothing passes
/// the prevResult on (CNI spec, "ADD").
pub fn pass_through(config: &NetworkConfig) -> String {
    match &config.prev_result {
        Some(raw) => raw.get().to_owned(),
        None if config.version < SpecVersion::V0_3_0 => {
            format!(r#"{{"cniVersion":"{}","dns":{{}}}}"#, config.version)
        }
        None => format!(
            r#"{{"cniVersion":"{}","interfaces":[],"ips":[],"routes":[],"dns":{{}}}}"#,
            config.version
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorCode;

    const LEGACY: [&str; 3] = ["", "0.1.0", "0.2.0"];

    fn config(version: &str, prev_result: &str) -> NetworkConfig {
        let text =
            format!(r#"{{"cniVersion":"{version}","name":"net","type":"inpod-cni"{prev_result}}}"#);
        NetworkConfig::parse(text.as_bytes()).unwrap()
    }

    fn found(version: &str, prev_result: &str) -> Result<Vec<String>, CniError> {
        let config = config(version, &format!(r#","prevResult":{prev_result}"#));
        let addresses = addresses(&config, &"eth0".parse().unwrap())?;
        Ok(addresses.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn addresses_of_the_interface_in_the_sandbox_are_chosen() {
        for (prev_result, expected) in [
            // portmap passes on a result of 0.4.0 in this form.
            (
                r#"{"interfaces":[{"name":"cni0"},{"name":"eth0","sandbox":"/n"}],
                    "ips":[{"version":"4","address":"10.0.0.2/24","interface":1}]}"#,
                vec!["10.0.0.2"],
            ),
            // A pod with two address families has another interface with an address of its own.
            (
                r#"{"interfaces":[{"name":"eth0","sandbox":"/n"},{"name":"net1","sandbox":"/n"}],
                    "ips":[{"address":"10.0.0.2/24","interface":0},{"address":"10.9.0.2/24","interface":1},
                           {"address":"fd77::2/64","interface":0}]}"#,
                vec!["10.0.0.2", "fd77::2"],
            ),
            // The host's end of the veth pair has the same name.
            (
                r#"{"interfaces":[{"name":"eth0"},{"name":"eth0","sandbox":"/n"}],
                    "ips":[{"address":"10.0.0.1/24","interface":0},{"address":"10.0.0.2/24","interface":1}]}"#,
                vec!["10.0.0.2"],
            ),
            // No address is assigned to an interface.
            (
                r#"{"ips":[{"address":"10.0.0.2/24"},{"address":"fd77::2"}]}"#,
                vec!["10.0.0.2", "fd77::2"],
            ),
            (
                r#"{"interfaces":[{"name":"eth0","sandbox":""}],"ips":[{"address":"10.0.0.2/24","interface":-1}]}"#,
                vec!["10.0.0.2"],
            ),
            (r#"{"interfaces":null,"ips":null}"#, vec![]),
            ("{}", vec![]),
        ] {
            assert_eq!(
                found("1.0.0", prev_result).unwrap(),
                expected,
                "{prev_result}"
            );
        }
    }

    #[test]
    fn addresses_of_0_1_0_and_0_2_0_are_read_from_ip4_and_ip6() {
        for (prev_result, expected) in [
            (
                r#"{"cniVersion":"0.1.0","ip4":{"ip":"10.0.0.2/24","gateway":"10.0.0.1","routes":[{"dst":"0.0.0.0/0"}]},
                    "ip6":{"ip":"fd77::2/64"},"dns":{}}"#,
                vec!["10.0.0.2", "fd77::2"],
            ),
            (r#"{"ip4":{"ip":"10.0.0.2"}}"#, vec!["10.0.0.2"]),
            (r#"{"ip4":null,"ip6":{"ip":"fd77::2/64"}}"#, vec!["fd77::2"]),
            (r#"{"dns":{}}"#, vec![]),
        ] {
            for version in LEGACY {
                assert_eq!(
                    found(version, prev_result).unwrap(),
                    expected,
                    "{prev_result}"
                );
            }
            // From 0.3.0 on, the spec does not define these keys.
            assert_eq!(found("0.3.0", prev_result), Ok(vec![]), "{prev_result}");
        }
    }

    #[test]
    fn what_is_no_address_is_error_7_and_named() {
        for (prev_result, named) in [
            (r#"{"ips":[{"address":"10.0.0.300/24"}]}"#, "10.0.0.300"),
            (
                r#"{"ips":[{"address":"::ffff:10.0.0.1/96"}]}"#,
                "::ffff:10.0.0.1",
            ),
            (r#"{"ips":[{}]}"#, "address"),
            (r#"{"ips":"10.0.0.1"}"#, "sequence"),
            (r#"{"interfaces":{}}"#, "sequence"),
        ] {
            let error = found("1.0.0", prev_result).unwrap_err();
            assert_eq!(error.code, ErrorCode::InvalidConfig);
            assert!(error.msg.contains("prevResult"), "{error}");
            assert!(error.msg.contains(named), "{error}");
        }
    }

    #[test]
    fn an_invalid_address_in_ip4_or_ip6_is_error_7_and_named() {
        for (prev_result, named) in [
            (r#"{"ip4":{"ip":"10.0.0.300/24"}}"#, "ip4: "),
            (r#"{"ip6":{"ip":"::ffff:10.0.0.1/96"}}"#, "ip6: "),
            (r#"{"ip4":{}}"#, "missing field `ip`"),
            (r#"{"ip4":"10.0.0.1/24"}"#, "invalid type"),
            (r#"{"ip6":{"ip":7}}"#, "invalid type"),
        ] {
            for version in LEGACY {
                let error = found(version, prev_result).unwrap_err();
                assert_eq!(error.code, ErrorCode::InvalidConfig);
                assert!(error.msg.contains("prevResult: "), "{error}");
                assert!(error.msg.contains(named), "{error}");
            }
        }
    }

    #[test]
    fn a_prev_result_is_passed_on_byte_for_byte() {
        let raw = "{ \"ips\" : [ ],\n\t\"cniVersion\":\"1.0.0\", \"x\": 1.00, \"ü\":\"\\u00fc\" }";
        for version in ["", "0.1.0", "0.2.0", "1.0.0"] {
            let config = config(version, &format!(",\"prevResult\": {raw} "));
            assert_eq!(pass_through(&config), raw);
        }
    }

    #[test]
    fn without_a_prev_result_an_empty_one_of_the_same_version_is_printed() {
        for (version, expected) in [
            ("", r#"{"cniVersion":"0.1.0","dns":{}}"#),
            ("0.1.0", r#"{"cniVersion":"0.1.0","dns":{}}"#),
            ("0.2.0", r#"{"cniVersion":"0.2.0","dns":{}}"#),
            (
                "1.0.0",
                r#"{"cniVersion":"1.0.0","interfaces":[],"ips":[],"routes":[],"dns":{}}"#,
            ),
        ] {
            for none in ["", r#","prevResult":null"#] {
                let config = config(version, none);
                assert_eq!(pass_through(&config), expected);
                assert_eq!(addresses(&config, &"eth0".parse().unwrap()), Ok(vec![]));
            }
        }
    }
}
