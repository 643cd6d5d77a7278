//! `inpod inject`: injects the sidecar into a manifest like the injector does, so that the result can be reviewed.

use std::{io::Read as _, path::Path};

use inpod_injection::{Config, Injector, files};
use serde_json::{Value, json};

use crate::{
    arguments::{InjectOptions, InjectOutput},
    error::CommandError,
    out::Out,
};

/// The text for standard output, and the remarks for standard error.
#[derive(Debug, PartialEq, Eq)]
struct Output {
    text: String,
    remarks: Vec<String>,
}

/// Prints the objects or patches to standard output, and a remark about each object to standard error.
pub(crate) fn run(options: &InjectOptions, out: &mut Out) -> Result<(), CommandError> {
    let config = options.config.as_deref().map(read).transpose()?;
    let output = inject(
        &config.unwrap_or_default(),
        &read(&options.file)?,
        options.output,
    )?;
    for remark in &output.remarks {
        crate::print_error(&format!("{remark}\n"));
    }
    out.print_text(&output.text)
}

fn read(path: &Path) -> Result<String, CommandError> {
    let mut text = String::new();
    let read = if path == Path::new("-") {
        std::io::stdin().read_to_string(&mut text).map(drop)
    } else {
        std::fs::read_to_string(path).map(|read| text = read)
    };
    read.map_err(|error| {
        CommandError::Manifest(format!("cannot read {}: {error}", path.display()))
    })?;
    Ok(text)
}

/// Injects into every object of the manifest. A rejected object fails the whole call, so that no half of a manifest is
/// applied.
fn inject(config: &str, text: &str, form: InjectOutput) -> Result<Output, CommandError> {
    let injector = Config::parse(config).and_then(Injector::new);
    let injector = injector.map_err(|error| CommandError::Manifest(error.to_string()))?;
    let documents: Vec<Value> = serde_saphyr::from_multiple(text)
        .map_err(|error| CommandError::Manifest(format!("cannot parse the manifest: {error}")))?;
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
                Err(files::NotInjected::NoPods) => format!("{object}: creates no pods"),
                Err(files::NotInjected::Skipped(why)) => {
                    format!("{object}: not injected, {}", why.describe())
                }
                Err(files::NotInjected::Refused(error)) => {
                    return Err(CommandError::Manifest(format!("{object}: {error}")));
                }
            });
            patches.push(json!({"object": object, "patch": patch}).to_string());
        }
    }
    let text = match form {
        InjectOutput::Patch => patches.into_iter().map(|line| line + "\n").collect(),
        InjectOutput::Yaml => {
            files::to_yaml(&documents).map_err(|error| CommandError::Manifest(error.to_string()))?
        }
    };
    Ok(Output { text, remarks })
}

#[cfg(test)]
mod tests {
    use super::*;
    use InjectOutput::{Patch, Yaml};

    const MANIFEST: &str = "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: web}\nspec: {template: {spec: {containers: [{name: app, image: a}]}}}\n---\n---\napiVersion: v1\nkind: Service\nmetadata: {name: web}\n";

    #[test]
    fn what_makes_pods_is_injected_and_the_rest_stays() {
        let output = inject("", MANIFEST, Yaml).unwrap();
        assert_eq!(
            output.remarks,
            ["Deployment web: injected", "Service web: creates no pods"]
        );
        let documents: Vec<Value> = serde_saphyr::from_multiple(&output.text).unwrap();
        assert_eq!(
            documents[0]["spec"]["template"]["spec"]["containers"][1]["name"],
            "istio-proxy"
        );
        assert_eq!(documents[1]["metadata"]["name"], "web");
        assert_eq!(inject("", &output.text, Yaml).unwrap().text, output.text);
    }

    #[test]
    fn a_patch_of_each_object_leads_to_the_same() {
        let output = inject("", MANIFEST, Patch).unwrap();
        let lines: Vec<Value> = output
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
        let error = inject("", &wrong, Yaml).unwrap_err().to_string();
        assert!(
            error.contains("Deployment web") && error.contains("sidecar.istio.io/logLevel"),
            "{error}"
        );
        let error = inject("templates: {x: '{{ }}'}", MANIFEST, Yaml)
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("Go template") && error.contains("line 1"),
            "{error}"
        );
        assert!(inject("", "a: [", Yaml).is_err());
    }
}
