//! The processes of both sides: a registry, one prefill, one decode and a router; and one process that does all.

use std::{ffi::OsString, time::Duration};

use kvferry_plan::Blame;
use kvferry_registry::loopback_http;
use serde_json::Value;
use tokio::time::{Instant, sleep};

use crate::{
    args::{TransportArg, name_of},
    child::Child,
    failure::Failure,
    model::Located,
};

/// For the router to find its pair.
const FIND: Duration = Duration::from_secs(60);

/// An API that is asked.
#[derive(Clone, Debug)]
pub(super) struct Target {
    pub(super) name: &'static str,
    pub(super) url: String,
    pub(super) model: String,
    pub(super) http: reqwest::Client,
}

/// Counted at prefill.
#[derive(Clone, Copy, Debug)]
pub(super) struct Exposed {
    pub(super) seconds: f64,
    pub(super) count: f64,
}

pub(super) struct Cluster {
    pub(super) router: Target,
    pub(super) mono: Target,
    prefill: String,
    children: Vec<Child>,
}

impl Cluster {
    pub(super) async fn start(
        model: &Located,
        transport: TransportArg,
        pool_tokens: u32,
    ) -> Result<Self, Failure> {
        let (registry, registry_url) = Child::start("registry", "registry-0", Vec::new())?.ready().await?;
        let at = |role: &'static str, more: Vec<OsString>| {
            let mut list: Vec<OsString> = vec!["--model".into(), model.argument()];
            list.extend(more);
            Child::start(role, &format!("{role}-0"), list)
        };
        let known: Vec<OsString> = vec!["--registry".into(), registry_url.into()];
        let engine = |more: &[OsString]| {
            let pool = pool_tokens.to_string();
            let mut list: Vec<OsString> = more.to_vec();
            let engine = ["--arith", "fast", "--no-prefix-cache", "--pool-tokens", &pool];
            list.extend(engine.into_iter().map(OsString::from));
            list
        };
        let hand_off: Vec<OsString> =
            known.iter().cloned().chain(["--transport".into(), name_of(&transport).into()]).collect();
        let (prefill, decode) = (at("prefill", engine(&hand_off))?, at("decode", engine(&hand_off))?);
        let (router, mono) = (at("router", known)?, at("mono", engine(&[]))?);
        let ((prefill, prefill_url), (decode, _), (router, router_url), (mono, mono_url)) =
            tokio::try_join!(prefill.ready(), decode.ready(), router.ready(), mono.ready())?;
        Ok(Self {
            router: target("router", router_url).await?,
            mono: target("mono", mono_url).await?,
            prefill: prefill_url,
            children: vec![router, mono, prefill, decode, registry],
        })
    }

    /// Seconds of hand-offs that were not hidden behind prefill's computation, where prefill counts them.
    pub(super) async fn exposed(&self) -> Option<Exposed> {
        let request = self.router.http.get(format!("{}/metrics", self.prefill));
        let text = request.send().await.ok()?.text().await.ok()?;
        let sum = |name: &str| {
            let values = text
                .lines()
                .filter_map(|line| line.strip_prefix(name)?.rsplit(' ').next()?.parse::<f64>().ok());
            values.reduce(|a, b| a + b)
        };
        let seconds = sum("kvferry_transfer_exposed_seconds_sum")?;
        Some(Exposed { seconds, count: sum("kvferry_transfer_exposed_seconds_count")? })
    }

    pub(super) async fn stop(self) {
        for child in self.children {
            child.stop().await;
        }
    }
}

/// Waits until an API is ready, and asks it for the name of its model.
async fn target(name: &'static str, url: String) -> Result<Target, Failure> {
    let failed = |e: String| Failure::new(Blame::Environment, format!("{name}: {e}"));
    let http = loopback_http().and_then(|b| b.build().map_err(|e| e.to_string())).map_err(failed)?;
    let until = Instant::now() + FIND;
    loop {
        let answer = http.get(format!("{url}/ready")).send().await.map_err(|e| failed(e.to_string()))?;
        if answer.status().is_success() {
            break;
        }
        if Instant::now() > until {
            return Err(failed(format!("not ready within {} s", FIND.as_secs())));
        }
        sleep(Duration::from_millis(50)).await;
    }
    let answer = http.get(format!("{url}/v1/models")).send().await.map_err(|e| failed(e.to_string()))?;
    let models: Value = answer.json().await.map_err(|e| failed(e.to_string()))?;
    let model = models["data"][0]["id"].as_str().unwrap_or_default().to_owned();
    Ok(Target { name, url, model, http })
}
