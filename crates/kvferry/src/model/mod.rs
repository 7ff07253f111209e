//! Which model is meant, where it lies, and how it gets there. Not for reading it (`kvferry_engine::checkpoint`).

mod fetch;
mod hub;
mod pull;

use std::{
    ffi::OsString,
    fmt,
    path::{Path, PathBuf},
    str::FromStr,
};

use kvferry_engine::checkpoint::{Checkpoint, Embedded};
use kvferry_plan::Blame;

use crate::{
    failure::Failure,
    terminal::{self, Look, styled},
};
pub(crate) use fetch::Progress;

/// What `--model` names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ModelRef {
    /// `embedded:needle_kimi` or `embedded:llama_tiny`: built in.
    Embedded(Embedded),
    /// `hf:owner/repo/file`: from the Hugging Face hub.
    Hub(hub::HubFile),
    /// A GGUF file, or a Hugging Face folder.
    Path(PathBuf),
    /// `smollm2`: SmolLM2-135M-Instruct, pinned by digest.
    SmolLm2,
}

impl FromStr for ModelRef {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "smollm2" {
            return Ok(Self::SmolLm2);
        }
        if let Some(name) = text.strip_prefix("embedded:") {
            let found = Embedded::ALL.into_iter().find(|embedded| embedded.name() == name);
            return found.map(Self::Embedded).ok_or_else(|| {
                let all = Embedded::ALL.map(|embedded| format!("`embedded:{}`", embedded.name()));
                format!("there is no built-in model {name:?}; use {}", all.join(" or "))
            });
        }
        if let Some(file) = text.strip_prefix("hf:") {
            return file.parse().map(Self::Hub);
        }
        if text.is_empty() {
            return Err("name a GGUF file, a Hugging Face folder, hf:owner/repo/file or smollm2".into());
        }
        Ok(Self::Path(text.into()))
    }
}

impl fmt::Display for ModelRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Embedded(embedded) => write!(f, "embedded:{}", embedded.name()),
            Self::Hub(file) => write!(f, "hf:{file}"),
            Self::Path(path) => write!(f, "{}", path.display()),
            Self::SmolLm2 => f.write_str("smollm2"),
        }
    }
}

/// A model that is on this machine.
#[derive(Clone, Debug)]
pub(crate) enum Located {
    /// A built-in checkpoint.
    Embedded(Embedded),
    /// A file or folder.
    At(PathBuf),
}

impl Located {
    /// Opens and checks it; weights are not read yet.
    pub(crate) fn open(&self) -> Result<Checkpoint, Failure> {
        Ok(match self {
            Self::Embedded(embedded) => embedded.open()?,
            Self::At(path) => Checkpoint::open(path)?,
        })
    }

    /// What clients of an API call it, where that is not the name of its file: the default model is `smollm2`, also for
    /// who names it by its path.
    pub(crate) fn served_name(&self) -> Option<String> {
        let Self::At(path) = self else { return None };
        let default = pull::path().is_ok_and(|pulled| pulled == *path);
        default.then(|| ModelRef::SmolLm2.to_string())
    }

    /// How a child process is told of it.
    pub(crate) fn argument(&self) -> OsString {
        match self {
            Self::Embedded(embedded) => ModelRef::Embedded(*embedded).to_string().into(),
            Self::At(path) => path.into(),
        }
    }
}

/// Finds the model on this machine, fetching what can be fetched.
pub(crate) async fn locate(model: &ModelRef, progress: Progress) -> Result<Located, Failure> {
    match model {
        ModelRef::Embedded(embedded) => Ok(Located::Embedded(*embedded)),
        ModelRef::Hub(file) => hub::fetch(file, progress).await.map(Located::At),
        ModelRef::Path(path) if path.exists() => Ok(Located::At(path.clone())),
        ModelRef::Path(path) => Err(Failure::new(
            Blame::Caller,
            format!(
                "model {}: there is no such file or folder; name a GGUF file, a Hugging Face folder, \
                 hf:owner/repo/file or smollm2",
                path.display()
            ),
        )),
        ModelRef::SmolLm2 => pull::smollm2(progress).await.map(Located::At),
    }
}

/// The model that was named; or the default one; or, when nobody named one and no source has it, the built-in one, which
/// is said.
pub(crate) async fn or_embedded(named: Option<&ModelRef>, progress: Progress) -> Result<Located, Failure> {
    match (locate(named.unwrap_or(&ModelRef::SmolLm2), progress).await, named) {
        (Err(why), None) => {
            let embedded = Embedded::default();
            let note = format!(
                "no SmolLM2 here: using the built-in checkpoint {} (it reads bytes and finds needles)",
                embedded.name()
            );
            if progress == Progress::Quiet {
                terminal::note(format_args!("{note}; {why}"));
            } else {
                terminal::paragraph(styled(Look::Strong, note), 0);
                terminal::note(why);
            }
            Ok(Located::Embedded(embedded))
        }
        (found, _) => found,
    }
}

/// Where the model lies now, or would after `model pull`; never fetches. An error when it is not there.
pub(crate) fn path(model: &ModelRef) -> Result<PathBuf, Failure> {
    let path = match model {
        ModelRef::Embedded(_) => {
            return Err(Failure::new(
                Blame::Caller,
                format!("{model} is part of the binary and has no path"),
            ));
        }
        ModelRef::Hub(file) => hub::path(file)?,
        ModelRef::Path(path) => path.clone(),
        ModelRef::SmolLm2 => pull::path()?,
    };
    if path.exists() {
        return Ok(path);
    }
    let text = format!("{} is not there; run `kvferry model pull {model}`", path.display());
    Err(Failure::new(Blame::Environment, text))
}

/// Whether the default model is in the cache and whole; where, or why not. Reads all of it.
pub(crate) fn cached() -> Result<String, String> {
    pull::cached()
}

/// Names of the other files in the cache.
pub(crate) fn others() -> Vec<String> {
    let folder = cache().ok().and_then(|folder| std::fs::read_dir(folder).ok());
    let mut names: Vec<String> = folder
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter(|name| !name.starts_with('.') && name != pull::FILE)
        .take(20)
        .collect();
    names.sort();
    names
}

/// `$XDG_CACHE_HOME/kvferry/models`, or the same below `~/.cache`.
fn cache() -> Result<PathBuf, Failure> {
    let absolute = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|p| p.is_absolute());
    let base = absolute("XDG_CACHE_HOME").or_else(|| absolute("HOME").map(|home| home.join(".cache")));
    base.map(|base| base.join("kvferry").join("models")).ok_or_else(|| {
        Failure::new(
            Blame::Environment,
            "no cache folder: neither XDG_CACHE_HOME nor HOME is an absolute path; set one, or name a file with --model",
        )
    })
}

fn make_folder(path: &Path) -> Result<(), Failure> {
    std::fs::create_dir_all(path).map_err(|e| {
        Failure::new(Blame::Environment, format!("cannot make the folder {}: {e}", path.display()))
    })
}
