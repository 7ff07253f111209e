//! One request's telemetry, from its arrival to its end.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use kvferry_plan::{Blame, InstanceId, RoomKey};

use super::{Phase, Span, SpanValue, Telemetry, TraceContext, lock, timeline::Timeline};
use crate::{Problem, Stage, metrics::Ended};

/// What is known of a request that ended well.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Totals {
    /// Prompt tokens that were not computed, or not moved, because their cache was here already.
    pub(crate) cached: u64,
    /// [`kvferry_node::SourceReceipt::exposed_seconds`].
    pub(crate) exposed: Option<f64>,
}

/// Watches one request. Whoever drops it without saying how the request ended has lost it, which is told as well.
#[derive(Debug)]
pub(crate) struct RoomTelemetry {
    telemetry: Arc<Telemetry>,
    key: RoomKey,
    context: TraceContext,
    parent: Option<TraceContext>,
    prompt_tokens: u64,
    timeline: Arc<Mutex<Timeline>>,
    over: AtomicBool,
}

impl Telemetry {
    /// A request has come and waits for its place.
    pub(crate) fn begin(
        self: &Arc<Self>,
        key: RoomKey,
        prompt_tokens: usize,
        parent: Option<TraceContext>,
    ) -> RoomTelemetry {
        let mut timeline = Timeline::new();
        let began = timeline.began;
        let first = match self.role {
            "prefill" => &[Phase::Queue][..],
            "decode" => &[Phase::Queue, Phase::FirstToken],
            // Its engine does not say when it begins with a request.
            _ => &[Phase::FirstToken, Phase::Compute],
        };
        for phase in first {
            self.enter(&mut timeline, *phase, began);
        }
        RoomTelemetry {
            telemetry: Arc::clone(self),
            key,
            context: parent.map_or_else(|| TraceContext::of_room(key.room), TraceContext::child),
            parent,
            prompt_tokens: prompt_tokens as u64,
            timeline: Arc::new(Mutex::new(timeline)),
            over: AtomicBool::new(false),
        }
    }
}

impl RoomTelemetry {
    /// The trace's place, for those who are asked on behalf of this request.
    pub(crate) fn context(&self) -> TraceContext {
        self.context
    }

    /// The span of what is logged on the way.
    pub(crate) fn log_span(&self) -> tracing::Span {
        let RoomKey { room, attempt } = self.key;
        tracing::info_span!(target: "kvferry::room", "room", %room, attempt = attempt.0)
    }

    /// The request has its pages; from now on what the node tells of it is noted.
    pub(crate) fn admitted(&self) {
        self.leave(Phase::Queue);
        self.telemetry.rooms().insert(self.key, Arc::clone(&self.timeline));
    }

    pub(crate) fn enter(&self, phase: Phase) {
        self.telemetry.enter(&mut lock(&self.timeline), phase, Instant::now());
    }

    pub(crate) fn leave(&self, phase: Phase) {
        self.telemetry.leave(&mut lock(&self.timeline), phase, Instant::now());
    }

    /// The other instance is known.
    pub(crate) fn peer(&self, peer: &InstanceId) {
        lock(&self.timeline).peer.clone_from(&peer.0);
    }

    /// The hand-off is over.
    pub(crate) fn received(&self) {
        for phase in [Phase::Pair, Phase::Reserve, Phase::Wait, Phase::Transfer, Phase::Verify] {
            self.leave(phase);
        }
    }

    /// A token was generated.
    pub(crate) fn token(&self) {
        let mut timeline = lock(&self.timeline);
        timeline.generated += 1;
        self.telemetry.leave(&mut timeline, Phase::FirstToken, Instant::now());
    }

    /// The request has ended well.
    pub(crate) fn completed(&self, totals: Totals) {
        self.end("completed", totals, None);
    }

    /// The request has ended otherwise; `gone` when its client had left.
    pub(crate) fn failed(&self, problem: &Problem, gone: bool) {
        let begun = !matches!(problem.stage, Stage::Request | Stage::Admission | Stage::Lookup);
        let outcome = match problem {
            _ if gone => "aborted",
            Problem { cause_kind: "aborted", .. } => "aborted",
            Problem { blame: Blame::Caller, .. } if !begun => "refused",
            _ => "failed",
        };
        self.end(outcome, Totals::default(), Some(problem));
    }

    fn end(&self, outcome: &'static str, totals: Totals, problem: Option<&Problem>) {
        if self.over.swap(true, Ordering::Relaxed) {
            return;
        }
        let telemetry = &*self.telemetry;
        {
            let mut rooms = telemetry.rooms();
            if rooms.get(&self.key).is_some_and(|other| Arc::ptr_eq(other, &self.timeline)) {
                rooms.remove(&self.key);
            }
        }
        let mut timeline = lock(&self.timeline);
        let (ended, during) = (Instant::now(), timeline.current());
        timeline.over = true;
        for phase in Phase::ALL {
            telemetry.leave(&mut timeline, phase, ended);
        }
        telemetry.metrics.ended(&Ended {
            outcome,
            problem,
            peer: &timeline.peer,
            transport: timeline.transport,
            direction: if telemetry.role == "prefill" { "sent" } else { "received" },
            bytes: timeline.bytes,
            runs: timeline.copies,
            exposed: totals.exposed,
            prompt_tokens: self.prompt_tokens,
            cached_tokens: totals.cached,
            generated_tokens: timeline.generated,
        });
        self.log(&timeline, outcome, totals, problem, during);
        if let Some(sink) = telemetry.sink.as_ref().filter(|_| self.context.sampled) {
            sink.collect(self.spans(&timeline, outcome, totals, problem, ended));
        }
    }

    /// One line for each request. One that failed is a warning.
    fn log(
        &self,
        timeline: &Timeline,
        outcome: &'static str,
        totals: Totals,
        problem: Option<&Problem>,
        during: Option<Phase>,
    ) {
        let RoomKey { room, attempt } = self.key;
        let took = |phase| timeline.seconds(phase);
        macro_rules! line {
            ($level:ident) => {
                tracing::$level!(
                    target: "kvferry::room",
                    %room,
                    attempt = attempt.0,
                    side = self.telemetry.role,
                    peer = timeline.peer,
                    transport = timeline.transport,
                    outcome,
                    stage = problem.map(|p| tracing::field::display(p.stage)),
                    during = during.filter(|_| problem.is_some()).map(Phase::name),
                    cause = problem.map(|p| p.cause.as_str()),
                    blame = problem.map(|p| tracing::field::display(p.blame)),
                    tokens = self.prompt_tokens,
                    cached = totals.cached,
                    generated = timeline.generated,
                    bytes = timeline.bytes,
                    runs = timeline.copies,
                    exposed_seconds = totals.exposed,
                    seconds = timeline.began.elapsed().as_secs_f64(),
                    queue_seconds = took(Phase::Queue),
                    pair_seconds = took(Phase::Pair),
                    reserve_seconds = took(Phase::Reserve),
                    wait_seconds = took(Phase::Wait),
                    transfer_seconds = took(Phase::Transfer),
                    verify_seconds = took(Phase::Verify),
                    first_token_seconds = took(Phase::FirstToken),
                    compute_seconds = took(Phase::Compute),
                    "room ended"
                )
            };
        }
        if outcome == "failed" { line!(warn) } else { line!(info) }
    }

    fn spans(
        &self,
        timeline: &Timeline,
        outcome: &'static str,
        totals: Totals,
        problem: Option<&Problem>,
        ended: Instant,
    ) -> Vec<Span> {
        let text = |text: &str| SpanValue::Text(text.to_owned());
        let common = || {
            vec![
                ("kvferry.room", text(&self.key.room.to_string())),
                ("kvferry.attempt", SpanValue::Count(self.key.attempt.0.into())),
                ("kvferry.side", text(self.telemetry.role)),
                ("kvferry.peer", text(&timeline.peer)),
            ]
        };
        let mut whole = common();
        whole.extend([
            ("kvferry.instance", text(&self.telemetry.instance.0)),
            ("kvferry.transport", text(timeline.transport)),
            ("kvferry.outcome", text(outcome)),
            ("kvferry.tokens", SpanValue::Count(self.prompt_tokens)),
            ("kvferry.cached_tokens", SpanValue::Count(totals.cached)),
            ("kvferry.generated_tokens", SpanValue::Count(timeline.generated)),
            ("kvferry.bytes", SpanValue::Count(timeline.bytes)),
            ("kvferry.runs", SpanValue::Count(timeline.copies)),
        ]);
        whole.extend(totals.exposed.map(|seconds| ("kvferry.exposed_seconds", SpanValue::Seconds(seconds))));
        if timeline.more > 0 {
            whole.push(("kvferry.chunks_left_out", SpanValue::Count(timeline.more)));
        }
        let span = |name, parent: u64, began, ended, attributes| Span {
            context: self.context.child(),
            parent: Some(parent),
            remote_parent: false,
            name,
            began: timeline.wall(began),
            ended: timeline.wall(ended),
            attributes,
            error: None,
        };
        let mut spans = vec![Span {
            context: self.context,
            parent: self.parent.map(|parent| parent.span),
            remote_parent: self.parent.is_some(),
            error: problem.map(ToString::to_string),
            ..span("room", 0, timeline.began, ended, whole)
        }];
        let mut transfer = self.context.span;
        for lap in &timeline.laps {
            let attributes = common();
            let lap_span =
                span(lap.phase.name(), self.context.span, lap.began, lap.ended.unwrap_or(ended), attributes);
            if lap.phase == Phase::Transfer {
                transfer = lap_span.context.span;
            }
            spans.push(lap_span);
        }
        for piece in &timeline.pieces {
            let mut attributes = common();
            attributes.extend([
                ("kvferry.source_rank", SpanValue::Count(piece.source.0.into())),
                ("kvferry.first_token", SpanValue::Count(piece.tokens.start.0)),
                ("kvferry.end_token", SpanValue::Count(piece.tokens.end.0)),
                ("kvferry.bytes", SpanValue::Count(piece.bytes.0)),
                ("kvferry.runs", SpanValue::Count(piece.copies)),
            ]);
            spans.push(span("chunk", transfer, piece.began, piece.ended, attributes));
        }
        spans
    }
}

impl Drop for RoomTelemetry {
    fn drop(&mut self) {
        if self.over.load(Ordering::Relaxed) {
            return;
        }
        if matches!(self.telemetry.role, "mono" | "router") {
            // Its answer is a stream that whoever reads it drops.
            self.failed(&Problem::new(Blame::Caller, Stage::Compute, "the client went away"), true);
        } else {
            let cause =
                "the request's task ended without saying how it went; this is a defect, please report it";
            self.failed(&Problem::new(Blame::Us, Stage::Compute, cause), false);
        }
    }
}
