//! `kvferry up`: a local cluster, from nothing to an API that answers, and its end in order.

mod cluster;
mod keeper;
mod show;

use kvferry_engine::checkpoint::{Checkpoint, Embedded};
use kvferry_plan::Blame;
use tokio::signal::unix::{SignalKind, signal};

use crate::{
    args::UpArgs,
    failure::Failure,
    model::{self, Located, Progress},
    serve::blocking,
    terminal,
    transports::caution,
};
use cluster::Cluster;
use show::Ask;

/// Starts the cluster and keeps it until somebody ends it, or one of its processes cannot be kept.
pub(crate) async fn run(args: UpArgs) -> Result<(), Failure> {
    args.instance.engine.same_cache(&args.prefill, &args.decode)?;
    let lists = args.sides.of(&args.instance.engine.transport, (args.prefill.len(), args.decode.len()))?;
    caution(lists.iter().flatten());
    let mut stop = Stop::new()?;
    let progress = if args.json { Progress::Quiet } else { Progress::Shown };
    let started = async {
        let located = model::or_embedded(args.model.as_ref(), progress).await?;
        let opened = located.clone();
        let checkpoint: Checkpoint = blocking(move || opened.open()).await?;
        let ask = match (checkpoint.chat_template()?, checkpoint.tokenizer()?, &located) {
            (Some(_), ..) => Ask::Chat,
            (None, Some(_), Located::Embedded(Embedded::NeedleKimi)) => Ask::Needle,
            (None, Some(_), _) => Ask::Text,
            (None, None, _) => Ask::Ids,
        };
        let name = args.model_name.clone().or_else(|| located.served_name());
        let name = name.unwrap_or_else(|| checkpoint.name().to_owned());
        let cluster = Cluster::start(&args, &located, &name, progress).await?;
        Ok::<_, Failure>((cluster, name, ask))
    };
    let (mut cluster, name, ask) = tokio::select! {
        started = started => started?,
        // What was started ends with this process.
        () = stop.asked() => return Ok(()),
    };
    if args.json {
        terminal::line(show::json(&cluster, &name));
    } else {
        terminal::line(show::text(&cluster, &name, ask));
    }
    let died = tokio::select! {
        died = cluster.died() => Some(died),
        () = stop.asked() => None,
    };
    // Somebody who asks twice does not want to wait; the children see that this process is gone.
    tokio::spawn(async move {
        stop.asked().await;
        std::process::exit(130);
    });
    if died.is_none() && !args.json {
        terminal::line("finishing what is under way; Ctrl-C again ends it at once");
    }
    cluster.drain().await;
    let ended = |how| format!("{how}; the other processes were ended in order");
    died.map_or(Ok(()), |how| Err(Failure::new(Blame::Environment, ended(how))))
}

/// SIGINT and SIGTERM.
struct Stop {
    interrupt: tokio::signal::unix::Signal,
    terminate: tokio::signal::unix::Signal,
}

impl Stop {
    fn new() -> Result<Self, Failure> {
        let failed = |e| Failure::new(Blame::Environment, format!("cannot watch for signals: {e}"));
        Ok(Self {
            interrupt: signal(SignalKind::interrupt()).map_err(failed)?,
            terminate: signal(SignalKind::terminate()).map_err(failed)?,
        })
    }

    async fn asked(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }
}
