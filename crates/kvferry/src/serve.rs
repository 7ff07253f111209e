//! `kvferry serve`: one process of a cluster.

use std::{io::Read, time::Duration};

use indicatif::ProgressBar;
use kvferry_engine::{Model, Voice};
use kvferry_node::TransportKind;
use kvferry_plan::{Blame, Bytes, InstanceId};
use kvferry_registry::{Role, bind_loopback};
use kvferry_server::{
    Instance, InstanceConfig, Mono, MonoConfig, Router, RouterConfig, ServerError, serve_registry,
};
use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::{
    args::{InjectArg, RoleArg, ServeArgs, decodes, name_of},
    failure::Failure,
    model::{self, Progress},
    terminal,
    traces::Traces,
    transports::{Transports, caution},
};

/// How long a process whose parent is gone may take to end in order.
const ORPHAN: Duration = Duration::from_secs(2);

/// Runs a role until it is told to stop.
pub(crate) async fn run(args: ServeArgs) -> Result<(), Failure> {
    let drain = CancellationToken::new();
    if args.exit_with_parent {
        follow_parent(drain.clone())?;
    }
    stop_on_signals(drain.clone())?;
    // A parent says so itself.
    if !args.exit_with_parent && matches!(args.role, RoleArg::Prefill | RoleArg::Decode) {
        caution([&args.instance.engine.transport]);
    }
    let instance = args.name.clone().unwrap_or_else(|| format!("{}-0", name_of(&args.role)));
    let role = match args.role {
        RoleArg::Registry => {
            let listener = bind_loopback(args.listen).await?;
            let at = listener.local_addr().map_err(|e| Failure::new(Blame::Environment, e))?;
            ready(&format!("http://{at}"), &instance, args.role, None);
            return Ok(serve_registry(listener, drain).await?);
        }
        RoleArg::Router => return route(args, instance, drain).await,
        RoleArg::Prefill => Some(Role::Prefill),
        RoleArg::Decode => Some(Role::Decode),
        RoleArg::Mono => None,
    };
    if args.role == RoleArg::Decode {
        decodes(&args.layout)
            .map_err(|reason| Failure::new(Blame::Caller, format!("--layout {}: {reason}", args.layout)))?;
    }
    let located = model::locate(&args.model, Progress::Shown).await?;
    let engine = &args.instance.engine;
    let options = engine.load_options();
    let served_name = args.model_name.clone().or_else(|| located.served_name());
    let loading = waiting(&args, "loading the model");
    let model = blocking(move || Ok(Model::from_checkpoint(&located.open()?, options)?)).await?;
    loading.finish_and_clear();
    let mut config = args.instance.config(&args.layout);
    if args.role == RoleArg::Decode {
        config.fault = engine.inject.and_then(InjectArg::in_arithmetic);
    }
    let traces = Traces::from_env(&instance);
    let Some(role) = role else {
        let config = MonoConfig {
            instance: InstanceId(instance.clone()),
            model_name: served_name,
            listen: args.listen,
            engine: config,
            traces: traces.sink(),
        };
        let running = Mono::start(model, config).await?;
        ready(&running.url(), &instance, args.role, None);
        let served = running.serve(drain).await;
        traces.finish().await;
        return Ok(served?);
    };
    let config = InstanceConfig {
        instance: InstanceId(instance.clone()),
        role,
        listen: args.listen,
        registry: args.registry.clone().unwrap_or_default(),
        engine: config,
        transports: engine.transport.kinds(),
        rate: engine.throttle.map(Bytes),
        digest: !engine.no_digest,
        convert_kv: engine.convert_kv,
        inject: engine.inject.and_then(InjectArg::in_transfer),
        fault: engine.inject.and_then(InjectArg::at_source),
        queue: Duration::from_secs(args.instance.max_wait),
        traces: traces.sink(),
    };
    let running = Instance::start(model, config).await?;
    ready(&running.url(), &instance, args.role, Some(&engine.transport));
    let served = running.serve(drain).await;
    traces.finish().await;
    Ok(served?)
}

/// Runs a router, which reads of its model only what turns texts into tokens.
async fn route(args: ServeArgs, instance: String, drain: CancellationToken) -> Result<(), Failure> {
    let located = model::locate(&args.model, Progress::Shown).await?;
    let served_name = args.model_name.or_else(|| located.served_name());
    let mut voice = blocking(move || Ok(Voice::from_checkpoint(&located.open()?)?)).await?;
    if let Some(name) = served_name {
        voice.name = name;
    }
    let traces = Traces::from_env(&instance);
    let config = RouterConfig {
        instance: InstanceId(instance.clone()),
        voice,
        listen: args.listen,
        registry: args.registry.unwrap_or_default(),
        traces: traces.sink(),
    };
    let running = Router::start(config).await?;
    ready(&running.url(), &instance, args.role, None);
    let served = running.serve(drain).await;
    traces.finish().await;
    Ok(served?)
}

/// Runs what computes for long off the threads that answer.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Failure> + Send + 'static,
) -> Result<T, Failure> {
    tokio::task::spawn_blocking(work).await.map_err(|e| Failure::new(Blame::Us, e))?
}

/// Moves while something is waited for, unless a parent tells about this process.
fn waiting(args: &ServeArgs, what: &str) -> ProgressBar {
    let progress = if args.exit_with_parent { Progress::Quiet } else { Progress::Shown };
    progress.spinner(what)
}

fn ready(http: &str, instance: &str, role: RoleArg, transports: Option<&Transports>) {
    let pid = std::process::id();
    let mut line = json!({
        "ready": true, "role": name_of(&role), "instance": instance, "http": http, "pid": pid
    });
    if let Some(list) = transports {
        line["transports"] = list.kinds().into_iter().map(TransportKind::name).collect();
    }
    terminal::line(line);
}

fn stop_on_signals(drain: CancellationToken) -> Result<(), Failure> {
    let failed = |e| Failure::new(Blame::Environment, format!("cannot watch for signals: {e}"));
    let mut term = signal(SignalKind::terminate()).map_err(failed)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(failed)?;
    tokio::spawn(async move {
        tokio::select! {
            _ = term.recv() => {}
            _ = interrupt.recv() => {}
        }
        drain.cancel();
    });
    Ok(())
}

/// Drains when standard input ends, and exits soon after in any case.
fn follow_parent(drain: CancellationToken) -> Result<(), Failure> {
    let watch = move || {
        let mut byte = [0];
        // Nothing is ever sent: what matters is the end.
        while matches!(std::io::stdin().read(&mut byte), Ok(1..)) {}
        drain.cancel();
        std::thread::sleep(ORPHAN);
        std::process::exit(0);
    };
    std::thread::Builder::new()
        .name("parent-watch".into())
        .spawn(watch)
        .map(drop)
        .map_err(|e| Failure::new(Blame::Environment, format!("cannot start a thread: {e}")))
}

impl From<ServerError> for Failure {
    fn from(error: ServerError) -> Self {
        Self::new(error.blame(), error)
    }
}
