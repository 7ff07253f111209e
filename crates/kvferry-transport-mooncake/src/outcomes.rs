//! How writes stand that other threads carry out, for an engine that is asked.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
};

use kvferry_transport::slots::{EngineError, Progress, WriteId};

use crate::sender::lock;

/// `None` while one is under way.
type Known = BTreeMap<WriteId, Option<Result<(), String>>>;

/// Shared by an engine and those that write for it. A write that nobody wants to know of any more is not in it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Outcomes(Arc<Mutex<Known>>);

impl Outcomes {
    /// A write is under way.
    pub(crate) fn begin(&self, write: WriteId) {
        lock(&self.0).insert(write, None);
    }

    /// It has settled, or failed for a reason.
    pub(crate) fn end(&self, write: WriteId, outcome: Result<(), String>) {
        if let Some(known) = lock(&self.0).get_mut(&write) {
            *known = Some(outcome);
        }
    }

    pub(crate) fn forget(&self, write: WriteId) {
        lock(&self.0).remove(&write);
    }

    /// As [`kvferry_transport::slots::BlockEngine::poll`], of an engine of this name.
    pub(crate) fn progress(&self, write: WriteId, engine: &'static str) -> Result<Progress, EngineError> {
        let reason = match lock(&self.0).get(&write) {
            Some(None) => return Ok(Progress::Moving),
            Some(Some(Ok(()))) => return Ok(Progress::Settled),
            Some(Some(Err(reason))) => reason.clone(),
            None => "it was told to forget it".into(),
        };
        Err(EngineError::Failed { engine, action: "finish a write", reason })
    }
}
