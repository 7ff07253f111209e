//! The target's half of a push: what one source process sends, leg after leg.

use std::sync::Arc;

use kvferry_plan::Incarnation;

use crate::{
    Refusal, TransportError,
    local::Local,
    room::Landing,
    stats::add,
    wire::{LegId, Units},
};

/// The legs that come over one connection, one at a time.
pub(crate) struct Inbound {
    local: Arc<Local>,
    from: Incarnation,
    leg: Option<(LegId, Result<Landing, Refusal>)>,
}

impl Inbound {
    pub(crate) fn new(local: Arc<Local>, from: Incarnation) -> Self {
        Self { local, from, leg: None }
    }

    /// Whether `units` with `len` bytes are to be landed; if not, their payload is to be dropped.
    pub(crate) fn accepts(&mut self, id: &LegId, units: &Units, len: u32) -> bool {
        let first = (units.first, units.row) == (0, 0);
        let refusal = match self.begin(id, first) {
            Err(refusal) => Err(*refusal),
            Ok(landing) => match landing.expect(units) {
                Ok(expected) if expected.0 == u64::from(len) => return true,
                Ok(_) => Ok(Refusal::Length),
                Err(refusal) => Ok(refusal),
            },
        };
        if let Ok(new) = refusal {
            self.fail(new);
        }
        add(&self.local.counters.dropped, u64::from(len));
        false
    }

    /// Lands what was accepted.
    pub(crate) fn land(&mut self, units: &Units, payload: &[u8]) {
        if let Some((_, Ok(landing))) = &mut self.leg
            && let Err(error) = landing.land(units, payload)
        {
            self.failed(error);
        }
    }

    /// Ends a leg: `None` when all of it lies in the pool.
    pub(crate) fn end(&mut self, id: &LegId) -> Option<Refusal> {
        let outcome = self.begin(id, false).map(Landing::finish).map_err(|refusal| *refusal);
        match outcome {
            Err(refusal) => {
                self.leg = None;
                Some(refusal)
            }
            Ok(Err(error)) => {
                let refusal = self.failed(error);
                self.leg = None;
                Some(refusal)
            }
            Ok(Ok(report)) => {
                if let Some((_, Ok(landing))) = self.leg.take() {
                    landing.report(Ok(report));
                }
                None
            }
        }
    }

    /// The connection is gone; a leg that has not ended never will.
    pub(crate) fn lost(&mut self, error: impl FnOnce() -> TransportError) {
        if let Some((_, Ok(landing))) = self.leg.take() {
            landing.report(Err(error()));
        }
    }

    /// The leg `id`: the current one, unless it begins anew.
    fn begin(&mut self, id: &LegId, first: bool) -> Result<&mut Landing, &Refusal> {
        let current = self.leg.take_if(|(current, state)| {
            let restarts = first && !matches!(state, Ok(landing) if landing.fresh());
            current == id && !restarts
        });
        let leg = current.unwrap_or_else(|| {
            let leg = self.start(id);
            if let Err(refusal) = &leg {
                self.local.counters.refuse(*refusal);
            }
            (*id, leg)
        });
        self.leg.insert(leg).1.as_mut().map_err(|refusal| &*refusal)
    }

    fn start(&self, id: &LegId) -> Result<Landing, Refusal> {
        let room = self.local.room(id.key, id.generation, self.from)?;
        room.leg(id.source, id.target, id.tokens).inspect_err(|refusal| {
            room.report(id.source, id.target, id.tokens, Err(room.refused(*refusal)));
        })
    }

    /// Refuses the rest of the leg.
    fn fail(&mut self, refusal: Refusal) {
        if let Some((_, Ok(landing))) = &self.leg {
            self.failed(landing.room().refused(refusal));
        }
    }

    /// As [`Inbound::fail`], for an error that was found here.
    fn failed(&mut self, error: TransportError) -> Refusal {
        let refusal = match &error {
            TransportError::Refused { refusal, .. } => *refusal,
            _ => Refusal::Internal,
        };
        self.local.counters.refuse(refusal);
        if let Some((_, state)) = &mut self.leg {
            if let Ok(landing) = state {
                landing.report(Err(error));
            }
            *state = Err(refusal);
        }
        refusal
    }
}
