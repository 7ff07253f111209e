//! One process of the cluster, kept: its end is reported at once, an instance is started again, anything else ends all.

use std::{ffi::OsString, time::Duration};

use kvferry_plan::LayoutSpec;
use tokio::{
    sync::mpsc,
    time::{Instant, sleep},
};
use tokio_util::sync::CancellationToken;

use crate::{child::Child, failure::Failure, terminal};

/// Wait before the first new start; each further one in a row doubles it.
const PAUSE: Duration = Duration::from_millis(500);
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
    pub(super) args: Vec<OsString>,
}

impl Spec {
    pub(super) fn start(&self) -> Result<Child, Failure> {
        Child::start(self.role, &self.instance, self.args.clone())
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
            let mut how = tokio::select! {
                how = child.ended() => how,
                () = self.drain.cancelled() => return child.drain().await,
            };
            if since.elapsed() > WELL {
                starts = 0;
            }
            child = loop {
                let what = format!("{} (pid {}) {how}", self.spec.instance, child.pid());
                if self.spec.layout.is_none() || starts == STARTS {
                    // Nobody listens any more when the cluster ends already.
                    let _ = self.died.send(what).await;
                    return;
                }
                let pause = (PAUSE * 2_u32.pow(starts)).min(LONGEST);
                starts += 1;
                terminal::note(format_args!(
                    "{what}; start {starts} of {STARTS} in {:.1} s",
                    pause.as_secs_f64()
                ));
                let again = async {
                    sleep(pause).await;
                    self.spec.start()?.ready().await
                };
                tokio::select! {
                    again = again => match again {
                        Ok((again, _)) => break again,
                        Err(failure) => how = format!("did not start again: {failure}"),
                    },
                    () = self.drain.cancelled() => return,
                }
            };
            since = Instant::now();
            terminal::note(format_args!("{} runs again (pid {})", self.spec.instance, child.pid()));
        }
    }
}
