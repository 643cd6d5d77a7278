//! `inpod inject`: on files what the injector does at the API server, for review.

use std::{
    io::Read as _,
    path::{Path, PathBuf},
};

use inpod_injection::{Config, Injector, files};
use serde_json::{Value, json};

use crate::{error::AskError, out::Out};

/// What is to be injected, and how it is shown.
#[derive(Clone, Debug)]
pub(crate) struct InjectOrder {
    /// A manifest; `-` is standard input.
    pub(crate) file: PathBuf,
    /// The injector's configuration; none: its defaults.
    pub(crate) config: Option<PathBuf>,
    /// Whether the patch of each object is shown, not the object.
    pub(crate) is_patch: bool,
}

/// What is printed, and what is said about it.
#[derive(Debug, PartialEq, Eq)]
struct Shown {
    text: String,
    remarks: Vec<String>,
}

/// Prints the manifest as it would be; what became of each object goes to standard error.
pub(crate) fn run(order: &InjectOrder, out: &mut Out) -> Result<(), AskError> {
    let config = order.config.as_deref().map(read).transpose()?;
    let shown = inject(
        &config.unwrap_or_default(),
        &read(&order.file)?,
        order.is_patch,
    )?;
    for remark in &shown.remarks {
        crate::complain(&format!("{remark}\n"));
    }
    out.text(&shown.text)
}

fn read(path: &Path) -> Result<String, AskError> {
    let mut text = String::new();
    let read = if path == Path::new("-") {
        std::io::stdin().read_to_string(&mut text).map(drop)
    } else {
        std::fs::read_to_string(path).map(|read| text = read)
    };
    read.map_err(|error| AskError::Manifest(format!("cannot read {}: {error}", path.display())))?;
    Ok(text)
}

/// Nothing is printed where one object is refused: half a manifest would be applied.
fn inject(config: &str, text: &str, is_patch: bool) -> Result<Shown, AskError> {
    let injector = Config::parse(config).and_then(Injector::new);
    let injector = injector.map_err(|error| AskError::Manifest(error.to_string()))?;
    let documents: Vec<Value> = serde_saphyr::from_multiple(text)
        .map_err(|error| AskError::Manifest(format!("the manifest is no YAML: {error}")))?;
    let mut documents: Vec<_> = documents.into_iter().filter(|it| !it.is_null()).collect();
    let (mut remarks, mut patches) = (Vec::new(), Vec::new());
    for document in &mut documents {
        for files::Injected {
            object,
            result,
            patch,
        } in files::inject(&injector, document)
        {
            remarks.push(match result {
                Ok(()) => format!("{object}: injected"),
                Err(files::NotInjected::NoPods) => format!("{object}: makes no pods"),
                Err(files::NotInjected::Skipped(why)) => {
                    format!("{object}: left alone, {}", why.describe())
                }
                Err(files::NotInjected::Refused(error)) => {
                    return Err(AskError::Manifest(format!("{object}: {error}")));
                }
            });
            patches.push(json!({"object": object, "patch": patch}).to_string());
        }
    }
    let text = if is_patch {
        let lines = patches.into_iter().map(|line| line + "\n");
        lines.collect()
    } else {
        let text = files::to_yaml(&documents);
        text.map_err(|error| AskError::Manifest(error.to_string()))?
    };
    Ok(Shown { text, remarks })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MANIFEST: &str = "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: web}\nspec: {template: {spec: {containers: [{name: app, image: a}]}}}\n---\n---\napiVersion: v1\nkind: Service\nmetadata: {name: web}\n";

    #[test]
    fn what_makes_pods_is_injected_and_the_rest_stays() {
        let shown = inject("", MANIFEST, false).unwrap();
        assert_eq!(
            shown.remarks,
            ["Deployment web: injected", "Service web: makes no pods"]
        );
        let documents: Vec<Value> = serde_saphyr::from_multiple(&shown.text).unwrap();
        assert_eq!(
            documents[0]["spec"]["template"]["spec"]["containers"][1]["name"],
            "istio-proxy"
        );
        assert_eq!(documents[1]["metadata"]["name"], "web");
        assert_eq!(inject("", &shown.text, false).unwrap().text, shown.text);
    }

    #[test]
    fn a_patch_of_each_object_leads_to_the_same() {
        let shown = inject("", MANIFEST, true).unwrap();
        let lines: Vec<Value> = shown
            .text
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        assert_eq!(lines[0]["object"], "Deployment web");
        let paths = lines[0]["patch"].as_array().unwrap();
        assert!(
            paths
                .iter()
                .all(|it| it["path"].as_str().unwrap().starts_with("/spec/template"))
        );
        assert_eq!(lines[1]["patch"], json!([]));
    }

    #[test]
    fn what_is_refused_prints_nothing_and_is_named() {
        let wrong = MANIFEST.replace(
            "{spec: {containers",
            "{metadata: {annotations: {sidecar.istio.io/logLevel: 'a b'}}, spec: {containers",
        );
        let told = inject("", &wrong, false).unwrap_err().to_string();
        assert!(
            told.contains("Deployment web") && told.contains("sidecar.istio.io/logLevel"),
            "{told}"
        );
        let told = inject("templates: {x: '{{ }}'}", MANIFEST, false)
            .unwrap_err()
            .to_string();
        assert!(
            told.contains("Go template") && told.contains("line 1"),
            "{told}"
        );
        assert!(inject("", "a: [", false).is_err());
    }
}
