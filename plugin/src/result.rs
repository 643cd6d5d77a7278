//! Reads the results of other plugins and prints the plugin's own (CNI spec, "Success").

use std::net::IpAddr;

use inpod_types::IfName;
use serde::Deserialize;

use crate::{config::NetworkConfig, error::CniError};

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
    let invalid = |error| CniError::in_config("prevResult", error);
    let result: PrevResult = serde_json::from_str(raw.get()).map_err(invalid)?;
    let all = result.ips.unwrap_or_default();
    let ours = sandbox_interface_indices(&result.interfaces.unwrap_or_default(), ifname);
    let is_ours = |ip: &&Address| ip.interface.is_some_and(|index| ours.contains(&index));
    let mut chosen: Vec<&Address> = all.iter().filter(is_ours).collect();
    if chosen.is_empty() {
        chosen.extend(&all);
    }
    chosen.into_iter().map(parse).collect()
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

fn parse(ip: &Address) -> Result<IpAddr, CniError> {
    let (address, _prefix) = ip.address.split_once('/').unwrap_or((&ip.address, ""));
    inpod_types::parse_address(address)
        .map_err(|error| CniError::in_config("prevResult", format_args!("ips: {error}")))
}

/// Returns the prevResult byte for byte, or an empty result without one: a chained plugin that changes nothing passes
/// the prevResult on (CNI spec, "ADD").
pub fn pass_through(config: &NetworkConfig) -> String {
    match &config.prev_result {
        Some(raw) => raw.get().to_owned(),
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

    fn config(prev_result: &str) -> NetworkConfig {
        let text =
            format!(r#"{{"cniVersion":"1.0.0","name":"net","type":"inpod-cni"{prev_result}}}"#);
        NetworkConfig::parse(text.as_bytes()).unwrap()
    }

    fn found(prev_result: &str) -> Result<Vec<String>, CniError> {
        let config = config(&format!(r#","prevResult":{prev_result}"#));
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
            assert_eq!(found(prev_result).unwrap(), expected, "{prev_result}");
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
            let error = found(prev_result).unwrap_err();
            assert_eq!(error.code, ErrorCode::InvalidConfig);
            assert!(error.msg.contains("prevResult"), "{error}");
            assert!(error.msg.contains(named), "{error}");
        }
    }

    #[test]
    fn a_prev_result_is_passed_on_byte_for_byte() {
        let raw = "{ \"ips\" : [ ],\n\t\"cniVersion\":\"1.0.0\", \"x\": 1.00, \"ü\":\"\\u00fc\" }";
        assert_eq!(
            pass_through(&config(&format!(",\"prevResult\": {raw} "))),
            raw
        );
    }

    #[test]
    fn without_a_prev_result_an_empty_one_of_the_same_version_is_printed() {
        for none in ["", r#","prevResult":null"#] {
            let config = config(none);
            assert_eq!(
                pass_through(&config),
                r#"{"cniVersion":"1.0.0","interfaces":[],"ips":[],"routes":[],"dns":{}}"#
            );
            assert_eq!(addresses(&config, &"eth0".parse().unwrap()), Ok(vec![]));
        }
    }
}
