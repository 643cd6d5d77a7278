//! Each image is a stage of the Containerfile with its binaries and nothing else.

use std::collections::BTreeSet;

use crate::read;

/// A stage's base, name and instructions.
struct Stage {
    base: String,
    name: String,
    acts: Vec<String>,
}

impl Stage {
    fn all<'a>(&'a self, instruction: &'a str) -> impl Iterator<Item = &'a str> {
        let operands = move |act: &'a String| act.strip_prefix(instruction)?.strip_prefix(' ');
        self.acts.iter().filter_map(operands)
    }
}

/// Omits comments and joins continued lines.
fn stages() -> Vec<Stage> {
    let text = read("deploy/images/Containerfile").replace("\\\n", " ");
    let mut stages: Vec<Stage> = Vec::new();
    for line in text.lines().filter(|it| !it.starts_with('#')) {
        if let Some(from) = line.strip_prefix("FROM ") {
            let (base, name) = from.split_once(" AS ").unwrap();
            let [base, name] = [base, name].map(str::to_owned);
            let acts = Vec::new();
            stages.push(Stage { base, name, acts });
        } else if !line.is_empty() {
            stages.last_mut().unwrap().acts.push(line.to_owned());
        }
    }
    stages
}

/// Returns images and their binaries, as the build reads them.
fn components() -> Vec<(String, Vec<String>)> {
    let text = read("deploy/images/components");
    let words = text
        .lines()
        .map(|line| line.split('#').next().unwrap_or_default());
    let mut images = Vec::new();
    for mut words in words.map(|it| it.split_whitespace().map(str::to_owned)) {
        if let Some(image) = words.next() {
            images.push((image, words.collect()));
        }
    }
    images
}

/// The user without a manifest: only images that work on the node run as root.
fn user(image: &str) -> &'static str {
    match image {
        "validate" => "1337:1337",
        "injector" => "65532",
        _ => "0",
    }
}

const LABELS: [&str; 5] = ["title", "description", "licenses", "version", "revision"];

fn is_made_from_scratch(stage: &Stage, binaries: &[String]) {
    let name = &stage.name;
    let copied: Vec<_> = stage.all("COPY").map(str::to_owned).collect();
    // A binary that no user may read protects its process from its neighbors. The installer reads the plugin.
    let mode = |binary: &str| {
        if binary == "inpod-cni" {
            "0555"
        } else {
            "0111"
        }
    };
    let expected = binaries.iter();
    let expected = expected.map(|it| format!("--chmod={} bin/{it} /{it}", mode(it)));
    assert_eq!(copied, expected.collect::<Vec<_>>(), "{name}");
    let entrypoint = format!("[\"/{}\"]", binaries[0]);
    assert_eq!(stage.all("ENTRYPOINT").collect::<Vec<_>>(), [entrypoint]);
    assert_eq!(stage.all("USER").collect::<Vec<_>>(), [user(name)]);
    assert_eq!(stage.all("RUN").count(), 0, "{name}");
    let labels = stage.all("LABEL").collect::<String>();
    for label in LABELS {
        let label = format!("org.opencontainers.image.{label}=\"");
        assert_eq!(labels.matches(&label).count(), 1, "{name}: {label}");
    }
    let title = format!("title=\"{}\"", binaries[0]);
    assert!(labels.contains(&title), "{name}: {labels}");
}

#[test]
fn each_image_is_a_stage_from_scratch_with_its_binaries_its_labels_and_its_user() {
    let stages = stages();
    for (image, binaries) in components() {
        let stage = stages.iter().find(|it| it.name == image);
        let stage = stage.unwrap_or_else(|| panic!("the Containerfile has no {image}"));
        assert_eq!(stage.base, "scratch", "{image}");
        is_made_from_scratch(stage, &binaries);
    }
    let known: BTreeSet<_> = components().into_iter().map(|(image, _)| image).collect();
    let others = stages.iter().filter(|it| !known.contains(&it.name));
    let others: Vec<_> = others.map(|it| it.name.as_str()).collect();
    assert_eq!(others, ["compile", "binaries"]);
}

/// The builder chooses a stage's platform; a default of `TARGETARCH` would override it.
#[test]
fn the_containerfile_takes_any_architecture_for_it_names_none() {
    let names = ["amd64", "x86", "arm64", "aarch64", "ARCH", "PLATFORM"];
    for stage in stages() {
        for text in stage.acts.iter().chain([&stage.base]) {
            let named = names.iter().find(|it| text.contains(**it));
            assert_eq!(named, None, "{}: {text}", stage.name);
        }
    }
}

#[test]
fn the_stage_that_compiles_has_the_rust_that_the_workspace_asks_for() {
    let manifest = read("Cargo.toml");
    let version = manifest
        .lines()
        .find_map(|it| it.strip_prefix("rust-version = "));
    let stages = stages();
    let compile = stages.iter().find(|it| it.name == "compile").unwrap();
    let expected = format!("rust:{}-", version.unwrap().trim_matches('"'));
    assert!(compile.base.starts_with(&expected), "{}", compile.base);
}
