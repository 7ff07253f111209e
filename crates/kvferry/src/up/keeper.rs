//! One process of the cluster, kept: its end is told at once and it is started again. When that does not help, all end.

use std::{ffi::OsString, time::Duration};

use kvferry_plan::LayoutSpec;
use tokio::{
    sync::mpsc,
    time::{Instant, sleep},
};
use tokio_util::sync::CancellationToken;

use crate::{child::Child, failure::Failure, terminal};

/// Wait before the first new start; each further one in a row doubles it.
const PAUSE: Duration = Duration::from_millis(250);
/// The longest such wait.
const LONGEST: Duration = Duration::from_secs(10);
/// New starts in a row, after which it is given up.
const STARTS: u32 = 5;
/// A process that lived for so long was well: its end is a new story.
const WELL: Duration = Duration::from_secs(60);

/// How a process is started.
#[derive(Clone, Debug)]
pub(super) struct Spec {
    pub(super) role: &'static str,
    pub(super) instance: String,
    pub(super) layout: Option<LayoutSpec>,
    /// Where its port has to be, if others count on that.
    pub(super) listen: Option<String>,
    pub(super) args: Vec<OsString>,
}

impl Spec {
    pub(super) fn start(&self) -> Result<Child, Failure> {
        let listen = self.listen.iter().flat_map(|at| ["--listen", at]).map(OsString::from);
        Child::start(self.role, &self.instance, self.args.iter().cloned().chain(listen).collect())
    }
}

/// Keeps one process.
pub(super) struct Keeper {
    pub(super) spec: Spec,
    /// Ends it in order.
    pub(super) drain: CancellationToken,
    /// Told when it cannot be kept.
    pub(super) died: mpsc::Sender<String>,
}

impl Keeper {
    /// Until it is drained, or has died for good.
    pub(super) async fn run(self, mut child: Child) {
        let (mut since, mut starts) = (Instant::now(), 0);
        loop {
            let mut what = tokio::select! {
                how = child.ended() => format!("{} (pid {}) {how}", self.spec.instance, child.pid()),
                () = self.drain.cancelled() => return child.drain().await,
            };
            if since.elapsed() > WELL {
                starts = 0;
            }
            child = loop {
                if starts == STARTS {
                    // Nobody listens any more when the cluster ends already.
                    let _ = self.died.send(format!("{what}; it was started {STARTS} times again")).await;
                    return;
                }
                let pause = (PAUSE * 2_u32.pow(starts)).min(LONGEST);
                starts += 1;
                terminal::note(format_args!("{what}; start {starts} of {STARTS} follows in {pause:?}"));
                let again = async {
                    sleep(pause).await;
                    self.spec.start()?.ready().await
                };
                tokio::select! {
                    again = again => match again {
                        Ok((again, _)) => break again,
                        Err(failure) => what = failure.to_string(),
                    },
                    () = self.drain.cancelled() => return,
                }
            };
            since = Instant::now();
            terminal::note(format_args!("{} runs again (pid {})", self.spec.instance, child.pid()));
        }
    }
}
