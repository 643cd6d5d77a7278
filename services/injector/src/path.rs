//! Parses the path of a webhook. The path of injections may contain the proxy environment, by which a remote cluster names
//! itself (services/docs/facts/istio-sidecar.md, 6.2).

/// The path of injections, and the prefix of paths with variables.
const INJECT: &str = "/inject";

/// The path of pods that have to be in the mesh.
const GATE: &str = "/gate";

/// The separator of variables in the older syntax.
const ENV_MARKER: &str = ":ENV:";

/// The escape sequence for a slash in a value.
const SLASH_ESCAPE: &str = "--slash--";

/// The change that a webhook makes to a new pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// Adds sidecars, with the variables of the proxy environment.
    Inject(Vec<(String, String)>),
    /// Adds the readiness gate `inpod.io/InMesh`.
    Gate,
}

/// Returns `None` if the path is no webhook's.
pub fn change(path: &str) -> Option<Change> {
    if path == GATE {
        return Some(Change::Gate);
    }
    environment(path).map(Change::Inject)
}

/// Returns the variables in the order of the path, or `None` if the path is not the webhook's. Skips keys without a
/// value.
fn environment(path: &str) -> Option<Vec<(String, String)>> {
    let rest = path.strip_prefix(INJECT)?;
    if rest.is_empty() {
        return Some(Vec::new());
    }
    let rest = rest.strip_prefix('/')?;
    if rest.starts_with(ENV_MARKER) {
        let pairs = rest
            .split(ENV_MARKER)
            .filter_map(|pair| pair.split_once('='));
        return Some(
            pairs
                .filter_map(|(key, value)| variable(key, value))
                .collect(),
        );
    }
    let parts: Vec<_> = rest.trim_end_matches('/').split('/').collect();
    let pairs = parts.chunks_exact(2).filter_map(|pair| match pair {
        [key, value] => variable(key, value),
        _ => None,
    });
    Some(pairs.collect())
}

fn variable(key: &str, value: &str) -> Option<(String, String)> {
    let (key, value) = (percent_decode(key), percent_decode(value));
    if key.is_empty() {
        return None;
    }
    let name = match key.as_str() {
        "cluster" => "ISTIO_META_CLUSTER_ID".to_owned(),
        "net" => "ISTIO_META_NETWORK".to_owned(),
        _ => key.to_uppercase(),
    };
    Some((name, value.replace(SLASH_ESCAPE, "/")))
}

/// Decodes percent escapes, and leaves invalid escapes as they are.
fn percent_decode(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        let hex = after.get(..2).filter(|_| *first == b'%');
        let hex = hex.and_then(|hex| std::str::from_utf8(hex).ok());
        if let Some(byte) = hex.and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
            bytes.push(byte);
            rest = after.get(2..).unwrap_or_default();
        } else {
            bytes.push(*first);
            rest = after;
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(path: &str) -> String {
        let all = environment(path).unwrap();
        let all: Vec<_> = all
            .iter()
            .map(|(key, value)| format!("{key}={value}"))
            .collect();
        all.join(" ")
    }

    #[test]
    fn pairs_are_variables_and_two_keys_have_names_of_istios() {
        assert_eq!(found("/inject"), "");
        assert_eq!(found("/inject/"), "");
        assert_eq!(
            found("/inject/cluster/c1/net/n1"),
            "ISTIO_META_CLUSTER_ID=c1 ISTIO_META_NETWORK=n1"
        );
        assert_eq!(found("/inject/my_var/x/"), "MY_VAR=x");
        assert_eq!(found("/inject/a/b/odd"), "A=b");
        assert_eq!(
            found("/inject/url/http:--slash----slash--h--slash--p"),
            "URL=http://h/p"
        );
        assert_eq!(found("/inject/a/x%20y%2Fz%"), "A=x y/z%");
        assert_eq!(
            found("/inject/:ENV:cluster=c1:ENV:b=d=e"),
            "ISTIO_META_CLUSTER_ID=c1 B=d=e"
        );
        assert_eq!(found("/inject/:ENV:nothing"), "");
    }

    #[test]
    fn other_paths_are_not_the_webhooks() {
        for path in ["/", "/injected", "/gates", "/gate/", ""] {
            assert_eq!(change(path), None, "{path}");
        }
    }
}
