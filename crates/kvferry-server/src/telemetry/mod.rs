//! What is seen of requests: each has a timeline, which becomes counts, one line in the log and, if somebody collects
//! them, spans. Not for the numbers' names and descriptions (`metrics`).

mod room;
mod span;
mod timeline;

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use kvferry_node::{Moment, Observer, Side};
use kvferry_plan::{InstanceId, RoomKey};

use crate::metrics::InstanceMetrics;

pub(crate) use room::{RoomTelemetry, Totals};
pub use span::{Span, SpanValue, TraceContext, TraceSink};
pub(crate) use timeline::Phase;
use timeline::{Piece, Timeline};

/// What a process sees of its requests.
#[derive(Debug)]
pub(crate) struct Telemetry {
    metrics: InstanceMetrics,
    role: &'static str,
    instance: InstanceId,
    sink: Option<Arc<dyn TraceSink>>,
    /// Rooms that the node knows, so that what it tells of them is noted.
    rooms: Mutex<HashMap<RoomKey, Arc<Mutex<Timeline>>>>,
}

impl Telemetry {
    pub(crate) fn new(
        role: &'static str,
        instance: InstanceId,
        model: &str,
        sink: Option<Arc<dyn TraceSink>>,
    ) -> Self {
        let metrics = InstanceMetrics::new(role, &instance.0, model);
        Self { metrics, role, instance, sink, rooms: Mutex::default() }
    }

    pub(crate) fn metrics(&self) -> &InstanceMetrics {
        &self.metrics
    }

    fn rooms(&self) -> MutexGuard<'_, HashMap<RoomKey, Arc<Mutex<Timeline>>>> {
        // Every change is one insert or one remove.
        self.rooms.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn enter(&self, timeline: &mut Timeline, phase: Phase, at: Instant) {
        if timeline.enter(phase, at) {
            self.metrics.entered(phase);
        }
    }

    fn leave(&self, timeline: &mut Timeline, phase: Phase, at: Instant) {
        if let Some(took) = timeline.leave(phase, at) {
            self.metrics.left(phase, took.as_secs_f64());
        }
    }
}

impl Observer for Telemetry {
    fn saw(&self, side: Side, key: RoomKey, moment: Moment) {
        if let Moment::Unlinked { peer, transport } = &moment {
            self.metrics.unlinked(transport.name(), &peer.0);
        }
        let Some(room) = self.rooms().get(&key).cloned() else { return };
        let (mut timeline, now) = (lock(&room), Instant::now());
        let timeline = &mut *timeline;
        if timeline.over {
            return;
        }
        match (side, moment) {
            (_, Moment::Paired { peer, transport }) => {
                (timeline.peer, timeline.transport) = (peer.0, transport.name());
                self.leave(timeline, Phase::Pair, now);
                if side == Side::Target {
                    self.enter(timeline, Phase::Reserve, now);
                }
            }
            (_, Moment::Granted) => {
                self.leave(timeline, Phase::Reserve, now);
                self.enter(timeline, Phase::Wait, now);
            }
            (_, Moment::Offered) => {
                self.leave(timeline, Phase::Wait, now);
                self.enter(timeline, Phase::Transfer, now);
            }
            (_, Moment::Moved { source, tokens, bytes, copies, took }) => {
                let began = now.checked_sub(took).unwrap_or(now);
                self.enter(timeline, Phase::Transfer, began);
                timeline.add(Piece { source, tokens, bytes, copies, began, ended: now });
            }
            (_, Moment::Computed) => {
                self.leave(timeline, Phase::Compute, now);
                self.enter(timeline, Phase::Verify, now);
            }
            (_, Moment::Declared) => self.enter(timeline, Phase::Verify, now),
            _ => {}
        }
    }
}

/// Locks; every change of a timeline is whole at every moment.
fn lock(timeline: &Mutex<Timeline>) -> MutexGuard<'_, Timeline> {
    timeline.lock().unwrap_or_else(PoisonError::into_inner)
}
