//! The processes of the cluster: in which order they start, and in which they end.

use std::{ffi::OsString, time::Duration};

use kvferry_plan::{Blame, LayoutSpec};
use kvferry_registry::loopback_http;
use kvferry_server::PairHealth;
use serde::Deserialize;
use serde_json::Value;
use tokio::{
    sync::mpsc,
    task::JoinSet,
    time::{Instant, sleep},
};
use tokio_util::sync::CancellationToken;

use super::keeper::{Keeper, Spec};
use crate::{
    args::UpArgs,
    child::Child,
    failure::Failure,
    model::{Located, Progress},
    transports::Transports,
};

/// For the router to find a pair once all are ready; the registry's lease is far shorter.
const FIND: Duration = Duration::from_secs(30);

/// A process, for people.
#[derive(Clone, Debug)]
pub(super) struct Row {
    pub(super) instance: String,
    pub(super) role: &'static str,
    pub(super) layout: Option<LayoutSpec>,
    pub(super) pid: u32,
    pub(super) url: String,
}

/// The running cluster.
pub(super) struct Cluster {
    /// URL of the API.
    pub(super) url: String,
    pub(super) rows: Vec<Row>,
    /// Who can serve whom, and over what.
    pub(super) pairs: Vec<PairHealth>,
    /// Why others cannot.
    pub(super) refused: Vec<String>,
    /// Router, instances, registry: the order in which they end.
    tiers: [Tier; 3],
    died: mpsc::Receiver<String>,
}

/// Processes that end together.
#[derive(Default)]
struct Tier {
    drain: CancellationToken,
    keepers: JoinSet<()>,
}

impl Cluster {
    pub(super) async fn start(
        args: &UpArgs,
        model: &Located,
        name: &str,
        progress: Progress,
    ) -> Result<Self, Failure> {
        let spinner = progress.spinner("starting the registry");
        let registry = Spec {
            role: "registry",
            instance: "registry-0".into(),
            layout: None,
            listen: Some("127.0.0.1:0".into()),
            args: Vec::new(),
        };
        let (registry, registry_child, registry_url) = ready(registry).await?;
        // The router needs no weights: a port that is taken is found out before anything is loaded.
        let mut list: Vec<OsString> = vec!["--registry".into(), registry_url.clone().into()];
        list.extend(["--model".into(), model.argument(), "--model-name".into(), name.into()]);
        let router = Spec {
            role: "router",
            instance: "router-0".into(),
            layout: None,
            listen: Some(format!("127.0.0.1:{}", args.port)),
            args: list,
        };
        let (router, router_child, url) = ready(router).await.map_err(|failure| taken(failure, args.port))?;

        let specs = instances(args, &registry_url, model)?;
        let total = specs.len();
        let mut loading = JoinSet::new();
        for spec in specs {
            loading.spawn(ready(spec));
        }
        let mut ready = Vec::with_capacity(total);
        spinner.set_message(format!("loading {name}: 0 of {total} instances are ready"));
        while let Some(one) = loading.join_next().await {
            ready.push(one.map_err(|e| Failure::new(Blame::Us, e))??);
            spinner.set_message(format!("loading {name}: {} of {total} instances are ready", ready.len()));
        }
        ready.sort_by(|(a, ..), (b, ..)| (b.role, &a.instance).cmp(&(a.role, &b.instance)));
        spinner.set_message("waiting for the router to find a pair");
        let Found { pairs, refused } = serving(&url, total).await?;
        spinner.finish_and_clear();

        let (tell, died) = mpsc::channel(1);
        let mut tiers: [Tier; 3] = Default::default();
        let mut rows = Vec::new();
        let router = [(0, (router, router_child, url.clone()))];
        let instances = ready.into_iter().map(|one| (1, one));
        let registry = [(2, (registry, registry_child, registry_url))];
        for (tier, (spec, child, url)) in router.into_iter().chain(instances).chain(registry) {
            let Spec { role, instance, layout, .. } = spec.clone();
            rows.push(Row { instance, role, layout, pid: child.pid(), url });
            let Tier { drain, keepers } = &mut tiers[tier];
            keepers.spawn(Keeper { spec, drain: drain.clone(), died: tell.clone() }.run(child));
        }
        Ok(Self { url, rows, pairs, refused, tiers, died })
    }

    /// Waits for the end of a process that cannot be kept; answers what happened.
    pub(super) async fn died(&mut self) -> String {
        self.died.recv().await.unwrap_or_else(|| "nobody watches the processes; this is a defect".into())
    }

    /// Ends the processes in order, each after what it has under way.
    pub(super) async fn drain(self) {
        for Tier { drain, mut keepers } in self.tiers {
            drain.cancel();
            while keepers.join_next().await.is_some() {}
        }
    }
}

async fn ready(mut spec: Spec) -> Result<(Spec, Child, String), Failure> {
    let (child, url) = spec.start()?.ready().await?;
    // Others know it by this address, so that a new start of it has to take the same.
    if let (Some(listen), Some(at)) = (&mut spec.listen, url.strip_prefix("http://")) {
        at.clone_into(listen);
    }
    Ok((spec, child, url))
}

fn instances(args: &UpArgs, registry: &str, model: &Located) -> Result<Vec<Spec>, Failure> {
    let all = &args.instance.engine.transport;
    let [from, to] = args.sides.of(all, (args.prefill.len(), args.decode.len()))?;
    let side = |role: &'static str, layouts: &[LayoutSpec], lists: Vec<Transports>| {
        let spec = |(i, (layout, transport)): (usize, (&LayoutSpec, Transports))| {
            let mut told = args.instance.clone();
            told.engine.transport = transport;
            let mut list: Vec<OsString> = vec!["--registry".into(), registry.into()];
            list.extend(["--model".into(), model.argument(), "--layout".into(), layout.to_string().into()]);
            list.extend(told.to_args());
            let (instance, layout) = (format!("{role}-{i}"), Some(layout.clone()));
            // Whoever wants to reach an instance asks the registry, where each start of it says its own port.
            Spec { role, instance, layout, listen: None, args: list }
        };
        layouts.iter().zip(lists).enumerate().map(spec).collect::<Vec<_>>()
    };
    Ok([side("prefill", &args.prefill, from), side("decode", &args.decode, to)].concat())
}

/// The router's failure to start is nearly always its port.
fn taken(failure: Failure, port: u16) -> Failure {
    if !failure.to_string().contains("in use") {
        return failure;
    }
    let text = format!(
        "port {port} is taken by another process (perhaps another `kvferry up`); end that one, or choose another with \
         --port, 0 for any free one"
    );
    Failure::caller(text)
}

/// Pairs of instances, as the router's health tells them.
#[derive(Deserialize)]
struct Found {
    pairs: Vec<PairHealth>,
    refused: Vec<String>,
}

/// Waits until the router says that it can serve; the pairs that it knows then.
async fn serving(url: &str, instances: usize) -> Result<Found, Failure> {
    let failed = |e: String| Failure::new(Blame::Environment, e);
    let http = loopback_http().and_then(|b| b.build().map_err(|e| e.to_string())).map_err(failed)?;
    let until = Instant::now() + FIND;
    loop {
        let answer = http.get(format!("{url}/ready")).timeout(FIND).send().await;
        let reason = match answer {
            Ok(answer) if answer.status().is_success() => {
                let health = http.get(format!("{url}/health")).timeout(FIND).send();
                let body = async { health.await?.json::<Value>().await };
                let body = body.await.map_err(|e| failed(e.to_string()))?;
                // It may know some of them only.
                if body["instances"].as_u64() >= Some(instances as u64) || Instant::now() > until {
                    return serde_json::from_value(body)
                        .map_err(|e| failed(format!("the router's health: {e}")));
                }
                sleep(Duration::from_millis(50)).await;
                continue;
            }
            Ok(answer) => {
                let body: Value = answer.json().await.unwrap_or_default();
                body["reason"].as_str().unwrap_or("it gives no reason").to_owned()
            }
            Err(error) => error.to_string(),
        };
        // Who does not fit will not fit later.
        if Instant::now() > until || reason.contains("cannot serve") {
            return Err(failed(format!("the router finds no pair of instances: {reason}")));
        }
        sleep(Duration::from_millis(50)).await;
    }
}
