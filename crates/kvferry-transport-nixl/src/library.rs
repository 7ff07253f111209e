//! Where NIXL's library is.

#![forbid(unsafe_code)]

use std::{
    env, fs,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use kvferry_transport::slots::EngineError;

use crate::ffi::Api;

/// How the library is installed.
pub const INSTALL: &str = "install it into the active virtual environment with `python3 -m pip install --no-deps nixl-cu12==1.5.1`, \
                           or name it: KVFERRY_NIXL_LIB=/path/to/libnixl_capi.so";
const NAME: &str = "libnixl_capi.so";

pub(crate) fn missing(reason: String) -> EngineError {
    EngineError::Missing { engine: "NIXL", reason, remedy: INSTALL }
}

/// The library that a transport would load, loaded for a trial: its path, or its name where the loader knows it.
///
/// # Errors
/// [`EngineError::Missing`] when there is none, or one whose functions are not those of version 1.5.
pub fn located() -> Result<PathBuf, EngineError> {
    load().map(|(path, _)| path)
}

/// Loads the library, once.
pub(crate) fn load() -> Result<(PathBuf, Arc<Api>), EngineError> {
    static LOADED: Mutex<Option<(PathBuf, Arc<Api>)>> = Mutex::new(None);
    let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((path, api)) = &*loaded {
        return Ok((path.clone(), Arc::clone(api)));
    }
    let path = match env::var_os("KVFERRY_NIXL_LIB") {
        Some(path) => PathBuf::from(path),
        None => env::var_os("VIRTUAL_ENV")
            .and_then(|folder| in_environment(Path::new(&folder)))
            .unwrap_or_else(|| NAME.into()),
    };
    let api = Arc::new(Api::load(&path)?);
    *loaded = Some((path.clone(), Arc::clone(&api)));
    Ok((path, api))
}

/// In the site packages of a virtual environment.
fn in_environment(folder: &Path) -> Option<PathBuf> {
    let mut pythons: Vec<_> =
        fs::read_dir(folder.join("lib")).ok()?.filter_map(Result::ok).map(|e| e.path()).collect();
    pythons.sort();
    pythons
        .iter()
        .flat_map(|python| {
            ["12", "13"]
                .map(|cuda| python.join(format!("site-packages/.nixl_cu{cuda}.mesonpy.libs")).join(NAME))
        })
        .find(|path| path.is_file())
}
