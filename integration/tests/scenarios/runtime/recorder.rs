//! Records a runtime's plugin calls and answers: a program in the plugin's place passes both on.

use std::{fs, io::Write as _, os::unix::fs::PermissionsExt as _, path::Path};

use anyhow::Context as _;
use integration::bin;
use serde_json::Value;

use crate::runtime::chain::Chain;

/// One line for each call, by end. A single write(2) appends each, so concurrent lines do not mix.
const SCRIPT: &str = r#"#!/bin/sh
asked=$(cat)
answer=$(printf '%s' "$asked" | PLUGIN)
code=$?
printf '%s\t%s\t%s\t%s\t%s\t%s\n' "$CNI_COMMAND" "$CNI_CONTAINERID" "$CNI_NETNS" "$code" "$asked" "$answer" >>LOG
printf '%s' "$answer"
exit $code
"#;

#[derive(Clone, Debug)]
pub(crate) struct Recorded {
    pub(crate) verb: String,
    pub(crate) container_id: String,
    /// Empty if the runtime passed none.
    pub(crate) netns: String,
    pub(crate) code: i32,
    pub(crate) asked: Value,
    /// Null without an answer.
    pub(crate) answer: Value,
}

impl Recorded {
    pub(crate) fn error(&self) -> Option<u64> {
        self.answer.get("code")?.as_u64()
    }

    /// Returns command, whether a netns and the chain's result were passed, and exit code.
    pub(crate) fn summary(&self) -> (&str, bool, bool, i32) {
        let has_result = self.asked.get("prevResult").is_some();
        (&self.verb, !self.netns.is_empty(), has_result, self.code)
    }
}

/// Replaces the plugin from now on.
pub(crate) fn record(chain: &Chain) -> anyhow::Result<()> {
    let plugin = bin("inpod-cni")?.display().to_string();
    let log = log(chain).display().to_string();
    let aside = chain.plugins().join("recorder");
    let script = SCRIPT.replace("PLUGIN", &plugin).replace("LOG", &log);
    let mut file = fs::File::create(&aside)?;
    file.write_all(script.as_bytes())?;
    file.set_permissions(fs::Permissions::from_mode(0o755))?;
    drop(file);
    Ok(fs::rename(aside, chain.plugins().join("inpod-cni"))?)
}

pub(crate) fn recorded(chain: &Chain) -> anyhow::Result<Vec<Recorded>> {
    let text = match fs::read_to_string(log(chain)) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
        Err(error) => return Err(error).context("the record"),
    };
    text.lines().map(parse).collect()
}

fn log(chain: &Chain) -> std::path::PathBuf {
    Path::new(&chain.plugins()).with_file_name("calls")
}

fn parse(line: &str) -> anyhow::Result<Recorded> {
    let mut fields = line.splitn(6, '\t');
    let mut field = || fields.next().context("a field is missing");
    let (verb, container_id, netns) = (field()?, field()?, field()?);
    let (code, asked, answer) = (field()?, field()?, field()?);
    Ok(Recorded {
        verb: verb.to_owned(),
        container_id: container_id.to_owned(),
        netns: netns.to_owned(),
        code: code.parse()?,
        asked: serde_json::from_str(asked).with_context(|| asked.to_owned())?,
        answer: match answer {
            "" => Value::Null,
            answer => serde_json::from_str(answer).with_context(|| answer.to_owned())?,
        },
    })
}
