//! llama.cpp as a child process: a script for Node.js that counts CPU seconds by the same rule.

use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use kvferry_plan::Blame;
use serde::Deserialize;

use super::Rates;
use crate::failure::Failure;

/// How to get the package without building anything.
pub(crate) const INSTALL: &str = "npm i --prefix FOLDER --ignore-scripts --omit=optional \\
    node-llama-cpp@3.21.1 @node-llama-cpp/linux-x64@3.21.1";

const SCRIPT: &str = include_str!("llama.mjs");

/// Fails unless the package lies in `folder`.
pub(super) fn check(folder: &Path) -> Result<(), Failure> {
    let package = folder.join("node_modules").join("node-llama-cpp");
    if package.is_dir() {
        return Ok(());
    }
    let text = format_args!("{} is not there; make it with\n  {INSTALL}", package.display());
    Err(Failure::caller(text))
}

/// A folder with the package and a GGUF file.
pub(super) struct Llama {
    pub(super) folder: PathBuf,
    pub(super) file: PathBuf,
}

#[derive(Deserialize)]
struct Said {
    prefill: f64,
    decode: f64,
}

impl Llama {
    pub(super) fn measure(&self, prompt: u32, decode: u32) -> Result<Rates, Failure> {
        let failed = |what: String| {
            Failure::new(Blame::Environment, format_args!("llama.cpp: {what}; install it with\n  {INSTALL}"))
        };
        let script = tempfile::Builder::new()
            .suffix(".mjs")
            .tempfile()
            .and_then(|file| std::fs::write(file.path(), SCRIPT).map(|()| file))
            .map_err(|e| failed(format!("its script cannot be written: {e}")))?;
        let file = self.file.canonicalize().map_err(|e| failed(format!("{}: {e}", self.file.display())))?;
        let output = Command::new("node")
            .arg(script.path())
            .arg(file)
            .args([prompt.to_string(), decode.to_string()])
            .current_dir(&self.folder)
            .stdin(Stdio::null())
            .output()
            .map_err(|e| failed(format!("`node` in {} cannot be started: {e}", self.folder.display())))?;
        let said: Option<Said> = serde_json::from_slice(&output.stdout).ok();
        let Some(Said { prefill, decode }) = said.filter(|_| output.status.success()) else {
            let last = String::from_utf8_lossy(&output.stderr);
            let last = last
                .lines()
                .rfind(|line| line.contains("Error"))
                .unwrap_or("it said nothing of use")
                .to_owned();
            return Err(failed(format!("{}: {last}", output.status)));
        };
        Ok(Rates { prefill, decode })
    }
}
