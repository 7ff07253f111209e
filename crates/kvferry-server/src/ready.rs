//! Whether work would be done now. It follows progress and not a socket: the scheduler and the node are asked again and
//! again, and one that does not answer makes the process not ready.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use axum::{
    Json,
    http::StatusCode,
    response::{IntoResponse, Response},
};
use kvferry_engine::{Engine, EngineError};
use kvferry_node::Node;
use kvferry_plan::{Attempt, RoomId, RoomKey};
use serde::{Deserialize, Serialize};
use tokio_util::task::AbortOnDropHandle;

/// How long a part may leave a question unanswered. A step of the largest chunk on a busy machine takes seconds.
pub(crate) const PATIENCE: Duration = Duration::from_secs(15);

/// Whether work would be done now, and if not, why.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Ready {
    ready: bool,
    reason: Option<String>,
}

impl From<Result<(), String>> for Ready {
    fn from(state: Result<(), String>) -> Self {
        Self { ready: state.is_ok(), reason: state.err() }
    }
}

impl IntoResponse for Ready {
    fn into_response(self) -> Response {
        let status = if self.ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
        (status, Json(self)).into_response()
    }
}

/// A part that is asked.
#[derive(Debug)]
struct Part {
    name: &'static str,
    /// Since when the question is open.
    asked: Mutex<Option<Instant>>,
}

impl Part {
    fn asked(&self) -> MutexGuard<'_, Option<Instant>> {
        self.asked.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Asks the parts of a process whether they still get to their work.
#[derive(Debug)]
pub(crate) struct Watch {
    patience: Duration,
    parts: Mutex<Vec<(Arc<Part>, AbortOnDropHandle<()>)>>,
}

impl Watch {
    pub(crate) fn new(patience: Duration) -> Self {
        Self { patience, parts: Mutex::default() }
    }

    /// Asks a part from now on, a few times within the patience; `ask` ends when it has answered. Must be called within a
    /// tokio runtime.
    pub(crate) fn keep<F>(&self, name: &'static str, ask: impl Fn() -> F + Send + 'static)
    where
        F: Future<Output = ()> + Send,
    {
        let part = Arc::new(Part { name, asked: Mutex::default() });
        let (asked, pause) = (Arc::clone(&part), self.patience / 8);
        let task = tokio::spawn(async move {
            loop {
                *asked.asked() = Some(Instant::now());
                ask().await;
                *asked.asked() = None;
                tokio::time::sleep(pause).await;
            }
        });
        let mut parts = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
        parts.push((part, AbortOnDropHandle::new(task)));
    }

    /// The first part that has not answered for too long.
    pub(crate) fn check(&self) -> Result<(), String> {
        let parts = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
        for (part, _) in &*parts {
            let silent = part.asked().map(|since| since.elapsed()).unwrap_or_default();
            if silent >= self.patience {
                return Err(format!(
                    "{} has made no progress for {} s; if that does not change, restart this process and report it",
                    part.name,
                    silent.as_secs()
                ));
            }
        }
        Ok(())
    }
}

/// Comes true when the scheduler is between two steps; never when it has ended.
pub(crate) fn ask_engine(engine: &Engine) -> impl Future<Output = ()> + Send + use<> {
    // Nobody has this room: the answer is that it is not known, and that answer is what matters.
    let answer = engine.rows(RoomKey { room: RoomId(0), attempt: Attempt(u32::MAX) });
    async move {
        let ended = match answer {
            Ok(answer) => matches!(answer.await, Err(EngineError::Stopped)),
            Err(_) => true,
        };
        if ended {
            std::future::pending::<()>().await;
        }
    }
}

/// Comes true when the node has looked at what it was told; never when it has ended.
pub(crate) fn ask_node(node: &Node) -> impl Future<Output = ()> + Send + use<> {
    let answered = node.answers();
    async move {
        if !answered.await {
            std::future::pending::<()>().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use kvferry_engine::{EngineConfig, FirstToken, HandOff, LoadOptions, Model, Request, checkpoint};
    use kvferry_plan::TokenRange;

    use super::*;

    /// A hand-off that holds the scheduler until it is let go.
    struct Stuck(Mutex<mpsc::Receiver<()>>);

    impl HandOff for Stuck {
        fn chunk(&self, _: RoomKey, _: TokenRange) {
            self.0.lock().unwrap().recv().ok();
        }
        fn finished(&self, _: RoomKey, _: FirstToken) {}
        fn failed(&self, _: RoomKey, _: &EngineError) {}
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_scheduler_that_is_stuck_is_not_ready_until_it_goes_on() {
        let (go_on, stuck) = mpsc::channel();
        let model = Model::from_checkpoint(&checkpoint::embedded().unwrap(), LoadOptions::default()).unwrap();
        let stuck = Arc::new(Stuck(Mutex::new(stuck)));
        let engine = Arc::new(Engine::start(model, &EngineConfig::default(), stuck).unwrap());
        let watch = Watch::new(Duration::from_millis(400));
        let asked = Arc::clone(&engine);
        watch.keep("the scheduler", move || ask_engine(&asked));
        let until = |ready: bool| {
            let watch = &watch;
            async move {
                let waited = async {
                    while watch.check().is_ok() != ready {
                        tokio::time::sleep(Duration::from_millis(10)).await;
                    }
                };
                tokio::time::timeout(Duration::from_secs(60), waited).await.unwrap();
            }
        };
        assert_eq!(watch.check(), Ok(()));
        let key = RoomKey { room: RoomId(1), attempt: Attempt(0) };
        let lease = engine.prefill(key, Request::greedy(vec![1, 2, 3], 1)).unwrap();
        until(false).await;
        assert!(watch.check().unwrap_err().contains("the scheduler has made no progress"));
        go_on.send(()).unwrap();
        until(true).await;
        drop((lease, go_on));
    }
}
