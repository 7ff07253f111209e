//! When a request entered and left each stage, and what moved for it.

use std::time::{Duration, Instant, SystemTime};

use kvferry_plan::{Bytes, RankId, TokenRange};

/// Pieces of work that are kept one by one; more are only added up.
const PIECES: usize = 256;

/// A stage that a request goes through. Several may run at once: computing and moving do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    Queue,
    Pair,
    Reserve,
    Wait,
    Transfer,
    Verify,
    FirstToken,
    Compute,
}

impl Phase {
    pub(crate) const ALL: [Self; 8] = [
        Self::Queue,
        Self::Pair,
        Self::Reserve,
        Self::Wait,
        Self::Transfer,
        Self::Verify,
        Self::FirstToken,
        Self::Compute,
    ];

    /// As it is written in labels, log lines and spans.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Queue => "queue",
            Self::Pair => "pair",
            Self::Reserve => "reserve",
            Self::Wait => "wait",
            Self::Transfer => "transfer",
            Self::Verify => "verify",
            Self::FirstToken => "first_token",
            Self::Compute => "compute",
        }
    }

    /// Which side has it, and what it is.
    pub(crate) fn meaning(self) -> (&'static str, &'static str) {
        match self {
            Self::Queue => ("both", "from the request's arrival until it has its pages"),
            Self::Pair => (
                "both",
                "from then until both sides are connected and fit; decode looks the other up, prefill waits to be asked",
            ),
            Self::Reserve => ("decode", "until its pages may be written"),
            Self::Wait => {
                ("decode", "until prefill has a chunk: its queue, and the computation of that chunk")
            }
            Self::Transfer => ("both", "from the first byte moved (decode: offered) to the last"),
            Self::Verify => (
                "both",
                "from the end of the computation (decode: the first manifest) to the verdict; at prefill this is the exposed part",
            ),
            Self::FirstToken => ("decode, mono, router", "from the request's arrival to its first token"),
            Self::Compute => (
                "all",
                "the model's work: the prompt at prefill, the tokens after the first at decode, everything at mono and router",
            ),
        }
    }
}

/// One stay in a stage.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lap {
    pub(super) phase: Phase,
    pub(super) began: Instant,
    pub(super) ended: Option<Instant>,
}

/// One piece of work that moved bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    pub(super) source: RankId,
    pub(super) tokens: TokenRange,
    pub(super) bytes: Bytes,
    pub(super) copies: u64,
    pub(super) began: Instant,
    pub(super) ended: Instant,
}

/// Everything that was seen of one request. A stage is entered once.
#[derive(Debug)]
pub(super) struct Timeline {
    pub(super) began: Instant,
    wall: SystemTime,
    pub(super) laps: Vec<Lap>,
    pub(super) pieces: Vec<Piece>,
    /// Pieces that were only added up.
    pub(super) more: u64,
    pub(super) bytes: u64,
    pub(super) copies: u64,
    last_moved: Option<Instant>,
    /// The other instance; empty until it is known.
    pub(super) peer: String,
    /// What moves the bytes; empty until it is known.
    pub(super) transport: &'static str,
    /// Tokens that were generated here.
    pub(super) generated: u64,
    /// Nothing is noted any more.
    pub(super) over: bool,
}

impl Timeline {
    pub(super) fn new() -> Self {
        Self {
            began: Instant::now(),
            wall: SystemTime::now(),
            laps: Vec::with_capacity(Phase::ALL.len()),
            pieces: Vec::new(),
            more: 0,
            bytes: 0,
            copies: 0,
            last_moved: None,
            peer: String::new(),
            transport: "",
            generated: 0,
            over: false,
        }
    }

    /// Enters a stage; false when it was entered before.
    pub(super) fn enter(&mut self, phase: Phase, began: Instant) -> bool {
        if self.laps.iter().any(|lap| lap.phase == phase) {
            return false;
        }
        self.laps.push(Lap { phase, began, ended: None });
        true
    }

    /// Leaves a stage; how long it took, if it was in it.
    pub(super) fn leave(&mut self, phase: Phase, at: Instant) -> Option<Duration> {
        let at = match phase {
            Phase::Transfer => self.last_moved.unwrap_or(at),
            _ => at,
        };
        let lap = self.laps.iter_mut().find(|lap| lap.phase == phase && lap.ended.is_none())?;
        lap.ended = Some(at.max(lap.began));
        Some(at.saturating_duration_since(lap.began))
    }

    pub(super) fn add(&mut self, piece: Piece) {
        self.bytes = self.bytes.saturating_add(piece.bytes.0);
        self.copies = self.copies.saturating_add(piece.copies);
        self.last_moved = Some(piece.ended);
        if self.pieces.len() < PIECES {
            self.pieces.push(piece);
        } else {
            self.more += 1;
        }
    }

    /// The stage that it entered last and is still in.
    pub(super) fn current(&self) -> Option<Phase> {
        let open = self.laps.iter().filter(|lap| lap.ended.is_none() && lap.phase != Phase::FirstToken);
        open.max_by_key(|lap| lap.began).map(|lap| lap.phase)
    }

    /// How long it was in a stage that it has left, in seconds.
    pub(super) fn seconds(&self, phase: Phase) -> Option<f64> {
        let lap = self.laps.iter().find(|lap| lap.phase == phase)?;
        Some(lap.ended?.saturating_duration_since(lap.began).as_secs_f64())
    }

    /// The clock's time of an instant.
    pub(super) fn wall(&self, at: Instant) -> SystemTime {
        self.wall + at.saturating_duration_since(self.began)
    }
}
