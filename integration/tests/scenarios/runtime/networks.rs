//! Loads the CNI files of real CNIs, of distributions and of broken nodes (`tests/networks/*.txt`) as containerd and CRI-O
//! do (`cniload`), without inpod and with it.
//! `tests/networks/table.md` records the result; `UPDATE_GOLDEN=1` writes the table anew.

mod input;

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    sync::Mutex,
    thread,
};

use anyhow::{bail, ensure};
use integration::{TIMEOUT, bin, eventually, install_program, run};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::{
    common::installer_host::Host,
    runtime::networks::input::{Expected, Input, directory},
};

const INPOD: &str = "inpod-cni";

/// The entry that inpod replaces by its own.
const REPLACED: &str = "istio-cni";

const NOT_DECIDED: &str = "not checked yet";

/// A change that follows from an earlier one takes one more start.
const MAX_STARTS: usize = 5;

/// The installers mostly wait, so more of them run at once than there are processors.
const THREADS: usize = 6;

type Files = BTreeMap<PathBuf, (Vec<u8>, u32)>;

/// The result for one input.
struct Observed {
    /// The output of cniload without inpod, and with it.
    without: Value,
    with: Value,
    /// The plugins of the file that the network names as the one that Multus calls.
    cluster_network: Vec<String>,
    status: String,
}

impl Observed {
    fn is_ready(&self) -> bool {
        self.status == "ready"
    }
}

fn strings(value: &Value) -> Vec<String> {
    let items = value.as_array().into_iter().flatten();
    items
        .filter_map(|item| Some(item.as_str()?.to_owned()))
        .collect()
}

fn networks(loaded: &Value) -> &[Value] {
    loaded["networks"].as_array().map_or(&[], Vec::as_slice)
}

/// Counts the calls of inpod in the first network, by meta plugins as well.
fn calls(observed: &Observed) -> usize {
    let Some(first) = networks(&observed.with).first() else {
        return 0;
    };
    let called = [strings(&first["plugins"]), strings(&first["delegates"])].concat();
    let called = called.iter().chain(&observed.cluster_network);
    called.filter(|kind| *kind == INPOD).count()
}

/// Returns what inpod has made worse for the runtime.
fn regression(without: &Value, with: &Value) -> Option<String> {
    let (before, after) = (networks(without), networks(with));
    if before.len() != after.len() {
        return Some(format!(
            "{} networks have become {}",
            before.len(),
            after.len()
        ));
    }
    before
        .iter()
        .zip(after)
        .enumerate()
        .find_map(|(index, (before, after))| {
            let mut plugins = strings(&after["plugins"]);
            let mut expected = strings(&before["plugins"]);
            // Only the first network may have one entry of inpod in addition.
            let at = plugins.iter().position(|kind| kind == INPOD);
            if let Some(at) =
                at.filter(|_| index == 0 && !expected.iter().any(|kind| kind == INPOD))
            {
                plugins.remove(at);
                expected.retain(|kind| kind != REPLACED);
            }
            let keys = [
                "name",
                "cniVersion",
                "ifName",
                "delegates",
                "clusterNetwork",
            ];
            let is_same = keys.iter().all(|key| before[key] == after[key]) && plugins == expected;
            (!is_same).then(|| format!("network {index} was {before} and is {after}"))
        })
}

/// Returns the properties that do not hold.
fn problems(expected: &Expected, observed: &Observed) -> Vec<String> {
    let mut found: Vec<_> = regression(&observed.without, &observed.with)
        .into_iter()
        .collect();
    let count = calls(observed);
    if observed.is_ready() != (count == 1) {
        found.push(format!(
            "inpod is called {count} times while the installer reports: {}",
            observed.status
        ));
    }
    match expected {
        Expected::Either => {}
        Expected::Ready if observed.is_ready() => {}
        Expected::Ready => found.push(format!("not ready: {}", observed.status)),
        Expected::Refused(words) | Expected::Waits(words) => {
            let missing = words.iter().filter(|word| !observed.status.contains(*word));
            found.extend(missing.map(|word| format!("no {word} in: {}", observed.status)));
            if observed.is_ready() {
                found.push("ready".to_owned());
            }
        }
    }
    found
}

fn load(host: &Host, input: &Input) -> anyhow::Result<Value> {
    let root = host.path("").display().to_string();
    let arguments = [&[root, "/cniload".to_owned()], input.load()].concat();
    Ok(serde_json::from_str(&run("chroot", &arguments)?)?)
}

#[expect(
    clippy::disallowed_methods,
    reason = "integration/test tells where cniload is"
)]
fn install_loader(host: &Host) -> anyhow::Result<()> {
    let program =
        std::env::var("CNILOAD").expect("CNILOAD names the cniload to use: run ./integration/test");
    install_program(Path::new(&program), &host.path("cniload"))
}

/// Returns the versions that the plugin speaks.
fn spoken_versions() -> anyhow::Result<Vec<String>> {
    let script = r#"echo '{"cniVersion":"1.0.0"}' | CNI_COMMAND=VERSION "$0""#;
    let plugin = bin("inpod-cni")?.display().to_string();
    let answer: Value = serde_json::from_str(&run("sh", &["-c", script, &plugin])?)?;
    Ok(strings(&answer["supportedVersions"]))
}

/// Returns the version of the first network; an empty one means 0.1.0 (libcni, `ConfigDecoder`).
fn version(loaded: &Value) -> Option<&str> {
    let version = networks(loaded).first()?["cniVersion"].as_str()?;
    Some(if version.is_empty() { "0.1.0" } else { version })
}

/// Returns the files of the node, including inpod's state.
fn files(host: &Host) -> Files {
    let tops = ["etc", "nix", "opt", "var"];
    tops.iter().flat_map(|top| host.contents(top)).collect()
}

/// Leaves out the plugin and the state, which the installer may write before it can join the chain.
fn of_others(files: &Files) -> Files {
    let is_of_others = |path: &Path| {
        path.file_name().is_none_or(|name| name != INPOD)
            && !path.to_string_lossy().contains("/var/lib/inpod/")
    };
    let kept = files.iter().filter(|(path, _)| is_of_others(path));
    kept.map(|(path, file)| (path.clone(), file.clone()))
        .collect()
}

/// Waits until the installer has decided, and returns its unmet conditions, or "ready".
fn decision(host: &mut Host, address: &str) -> anyhow::Result<String> {
    let url = format!("http://{address}/readyz");
    let status = eventually("the installer decides", TIMEOUT, || {
        if !host.is_running() {
            return Ok(Err(anyhow::anyhow!("the installer has ended")));
        }
        match run("curl", &["-sS", &url]) {
            Ok(text) if !text.contains(NOT_DECIDED) => Ok(Ok(text)),
            Ok(text) => Err(text),
            Err(error) => Err(error.to_string()),
        }
    })??;
    if status == "ok\n" {
        return Ok("ready".to_owned());
    }
    let root = host.path("").display().to_string();
    let lines = status.lines().map(|line| line.replace(&root, "/"));
    Ok(lines.collect::<Vec<_>>().join("; "))
}

/// Starts the installer until a start changes no file, and returns the status of that start. The installer decides by the
/// directory and the record alone, so every later start would do the same.
fn settle(host: &mut Host, input: &Input, address: &str) -> anyhow::Result<String> {
    let settings = [
        input.settings(),
        vec![format!("--health-address={address}")],
    ]
    .concat();
    let settings: Vec<_> = settings.iter().map(String::as_str).collect();
    let mut before = files(host);
    for _ in 0..MAX_STARTS {
        host.start(&settings);
        let status = decision(host, address)?;
        host.stop(Signal::SIGTERM);
        let after = files(host);
        if after == before {
            return Ok(status);
        }
        before = after;
    }
    bail!("every start changes files")
}

/// Returns name and types of a list, or `None` for another file.
fn summary(path: &Path) -> Option<(Value, Vec<String>)> {
    let list: Value = serde_json::from_slice(&fs::read(path).ok()?).ok()?;
    let plugins = list["plugins"].as_array()?;
    let kinds = plugins.iter().map(|plugin| plugin["type"].clone());
    Some((list["name"].clone(), strings(&kinds.collect())))
}

fn cluster_network(host: &Host, input: &Input, loaded: &Value) -> Vec<String> {
    let named = networks(loaded).first().and_then(|first| {
        let path = first["clusterNetwork"].as_str()?;
        summary(&input.conf_dir(host).join(Path::new(path).file_name()?))
    });
    named.map(|(_, kinds)| kinds).unwrap_or_default()
}

/// Checks that a new file behind the first one has the network of the copied file, and inpod.
fn check_copy(host: &Host, input: &Input, original: &Files) -> anyhow::Result<()> {
    let Some(copied) = &input.copied else {
        return Ok(());
    };
    let dir = input.conf_dir(host);
    let (name, mut kinds) = summary(&dir.join(copied)).unwrap();
    kinds.push(INPOD.to_owned());
    let found = files(host);
    let first = original.keys().find(|path| path.parent() == Some(&dir));
    let mut new = found
        .keys()
        .filter(|path| path.parent() == Some(&dir) && !original.contains_key(*path));
    let is_copy = |path: &PathBuf| summary(path).as_ref() == Some(&(name.clone(), kinds.clone()));
    ensure!(
        new.any(|path| Some(path) > first && is_copy(path)),
        "no file behind {first:?} is a copy of {copied} with inpod"
    );
    Ok(())
}

/// Runs the installer on the node of an input, and checks every property.
fn judge(input: &Input, address: &str) -> anyhow::Result<Observed> {
    let mut host = input.host();
    install_loader(&host)?;
    let original = files(&host);
    let without = load(&host, input)?;
    let status = settle(&mut host, input, address)?;
    let with = load(&host, input)?;
    let observed = Observed {
        cluster_network: cluster_network(&host, input, &with),
        without,
        with,
        status,
    };
    let mut found = problems(&input.expected, &observed);
    if matches!(input.expected, Expected::Refused(_)) && of_others(&files(&host)) != original {
        found.push("the installer has changed the CNI files".to_owned());
    }
    if observed.is_ready()
        && let Some(version) = version(&observed.with)
        && !spoken_versions()?.iter().any(|spoken| spoken == version)
    {
        found.push(format!("the plugin does not speak version {version}"));
    }
    if let Err(error) = check_copy(&host, input, &original) {
        found.push(error.to_string());
    }
    let settings = input.settings();
    let uninstall = [
        &["uninstall"],
        &*settings.iter().map(String::as_str).collect::<Vec<_>>(),
    ]
    .concat();
    let left = host.run(&uninstall);
    ensure!(left.status.success(), "uninstall failed: {left:?}");
    if files(&host) != original && !input.is_joined {
        found.push("uninstall has left other files than before".to_owned());
    }
    ensure!(found.is_empty(), "{}", found.join("\n  "));
    Ok(observed)
}

fn judge_all(inputs: &[Input]) -> BTreeMap<&str, anyhow::Result<Observed>> {
    let queue = Mutex::new(inputs.iter().enumerate());
    let results = Mutex::new(BTreeMap::new());
    let work = || {
        loop {
            let next = queue.lock().unwrap().next();
            let Some((index, input)) = next else { break };
            // Each installer has an address of its own.
            let address = format!("127.0.{}.1:8080", index + 1);
            let result = judge(input, &address);
            results.lock().unwrap().insert(&*input.name, result);
        }
    };
    thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(work);
        }
    });
    results.into_inner().unwrap()
}

fn cell(loaded: &Value) -> String {
    if let Some(error) = loaded["error"].as_str() {
        return format!("error: {error}");
    }
    let shown = networks(loaded).iter().map(|network| {
        let text = |key: &str| network[key].as_str().unwrap_or_default().to_owned();
        let mut plugins = strings(&network["plugins"]).join(", ");
        let delegates = strings(&network["delegates"]);
        if !delegates.is_empty() {
            plugins = format!("{plugins} ({})", delegates.join(", "));
        }
        format!(
            "{} {} {}: {plugins}",
            text("ifName"),
            text("name"),
            text("cniVersion")
        )
    });
    shown.collect::<Vec<_>>().join("<br>")
}

fn table(inputs: &[Input], results: &BTreeMap<&str, anyhow::Result<Observed>>) -> String {
    let mut text = "| Input | Mode | Without inpod | With inpod | The installer says |\n|---|---|---|---|---|\n".to_owned();
    for input in inputs {
        let Some(Ok(observed)) = results.get(&*input.name) else {
            continue;
        };
        let with = if observed.with == observed.without {
            "the same".to_owned()
        } else {
            cell(&observed.with)
        };
        let cells = [
            &input.name,
            input.mode.as_deref().unwrap_or("owned"),
            &cell(&observed.without),
            &with,
            &observed.status,
        ]
        .map(|cell| cell.replace('|', "\\|").replace('\n', " "));
        text.push_str(&format!("| {} |\n", cells.join(" | ")));
    }
    text
}

#[test]
fn runtimes_load_the_same_networks_with_inpod_in_the_first() {
    let inputs = Input::all();
    let results = judge_all(&inputs);
    let failed: BTreeMap<_, _> = results
        .iter()
        .filter_map(|(name, result)| Some((*name, result.as_ref().err()?)))
        .collect();
    let report: Vec<_> = failed
        .iter()
        .map(|(name, error)| format!("{name}:\n  {error}"))
        .collect();
    let names: Vec<_> = failed.keys().copied().collect();
    assert!(names.is_empty(), "{names:?}\n{}", report.join("\n"));
    let path = directory().join("table.md");
    let found = table(&inputs, &results);
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        fs::write(&path, &found).unwrap();
    }
    let recorded = fs::read_to_string(&path).unwrap_or_default();
    assert_eq!(found, recorded, "UPDATE_GOLDEN=1 records it anew");
}

#[test]
fn every_violation_of_a_property_is_found() {
    let network = |name: &str, plugins: &[&str]| json!({"name": name, "ifName": "eth0", "cniVersion": "1.0.0", "plugins": plugins});
    let judged = |with: &[Value], status: &str| {
        let before = [network("a", &["bridge", "portmap"]), network("b", &["ptp"])];
        let observed = Observed {
            without: json!({"networks": before}),
            with: json!({"networks": with}),
            cluster_network: Vec::new(),
            status: status.to_owned(),
        };
        problems(&Expected::Either, &observed)
    };
    let joined = network("a", &["bridge", "portmap", INPOD]);
    let second = network("b", &["ptp"]);
    assert!(judged(&[joined.clone(), second.clone()], "ready").is_empty());
    for with in [
        &[joined.clone()][..],
        &[joined.clone(), second.clone(), second.clone()],
        &[second.clone(), joined.clone()],
        &[joined.clone(), network("b", &["ptp", INPOD])],
        &[network("a", &["portmap", "bridge", INPOD]), second.clone()],
        &[network("a", &["bridge", INPOD]), second.clone()],
        &[
            network("a", &["bridge", INPOD, "portmap", INPOD]),
            second.clone(),
        ],
        &[network("c", &["bridge", "portmap", INPOD]), second.clone()],
    ] {
        assert!(!judged(with, "ready").is_empty(), "{with:?}");
    }
    let unchanged = [network("a", &["bridge", "portmap"]), second.clone()];
    assert!(judged(&unchanged, "waiting").is_empty());
    assert!(!judged(&unchanged, "ready").is_empty());
    assert!(!judged(&[joined, second], "waiting").is_empty());
    // The runtime loads nothing because of an error, and the installer hides the error.
    let hidden = regression(
        &json!({"error": "invalid"}),
        &json!({"networks": unchanged}),
    );
    assert!(hidden.is_some());
}

#[test]
fn the_calls_of_a_meta_plugin_count_as_well() {
    let observed = |delegates: &[&str], cluster_network: &[&str]| Observed {
        without: Value::Null,
        with: json!({"networks": [{"plugins": ["multus"], "delegates": delegates}]}),
        cluster_network: cluster_network
            .iter()
            .map(|kind| (*kind).to_owned())
            .collect(),
        status: String::new(),
    };
    for (delegates, cluster_network, count) in [
        (&["calico"][..], &["calico"][..], 0),
        (&["calico", INPOD], &[], 1),
        (&[], &["calico", INPOD], 1),
        (&["calico", INPOD], &["calico", INPOD], 2),
    ] {
        assert_eq!(calls(&observed(delegates, cluster_network)), count);
    }
}
