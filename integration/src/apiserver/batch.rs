//! Sends many requests with a single curl process.

use std::{fmt::Write as _, io::Write as _, path::Path, process::Stdio};

use anyhow::Context as _;
use serde_json::Value;

use super::{ADDRESS, ApiServer, process::enter};
use crate::process::succeeded;

impl ApiServer {
    /// Creates the objects, each at its path, in no particular order.
    pub fn create_all(&self, objects: &[(String, Value)]) -> anyhow::Result<()> {
        self.batch(
            &["--parallel", "--parallel-max", "32"],
            "POST",
            "application/json",
            objects,
        )
    }

    /// Sends the patches in order over one connection.
    pub fn patch_all(&self, changes: &[(String, Value)]) -> anyhow::Result<()> {
        self.batch(&[], "PATCH", "application/merge-patch+json", changes)
    }

    fn batch(
        &self,
        flags: &[&str],
        method: &str,
        content: &str,
        requests: &[(String, Value)],
    ) -> anyhow::Result<()> {
        let authority = self.dir.join("certs/apiserver.crt");
        let mut config = String::new();
        for (index, (path, body)) in requests.iter().enumerate() {
            // The options must be repeated after each `next` (curl(1), --next).
            let next = if index == 0 { "" } else { "next\n" };
            // The quoted strings of curl know the escapes of JSON within a JSON string: \" and \\.
            let body = Value::String(body.to_string());
            write!(
                config,
                "{next}url = \"https://{ADDRESS}:6443{path}\"\nrequest = {method}\ncacert = {}\n\
                 header = \"Authorization: Bearer admin\"\nheader = \"Content-Type: {content}\"\n\
                 data-binary = {body}\noutput = /dev/null\nfail\nshow-error\nmax-time = 120\n",
                authority.display()
            )?;
        }
        let mut command = enter(&self.netns, Path::new("curl"));
        command
            .args(["--silent", "--fail-early"])
            .args(flags)
            .args(["--config", "-"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command
            .spawn()
            .context("cannot run curl; is it installed?")?;
        let stdin = child.stdin.take().context("curl has a standard input")?;
        { stdin }.write_all(config.as_bytes())?;
        succeeded("curl", &child.wait_with_output()?).map(drop)
    }
}
