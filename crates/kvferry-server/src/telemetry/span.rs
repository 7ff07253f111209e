//! Traces: which one a request belongs to, and its spans once it is over. How they are sent is somebody else's business.

use std::{
    fmt,
    hash::{BuildHasher, Hasher, RandomState},
    str::FromStr,
    time::SystemTime,
};

use axum::http::HeaderMap;
use kvferry_plan::RoomId;

/// Where in a trace something happens: the `traceparent` of W3C Trace Context.
///
/// ```
/// use kvferry_server::TraceContext;
/// let text = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
/// let context: TraceContext = text.parse().unwrap();
/// assert_eq!(context.to_string(), text);
/// assert!("00-0-0-01".parse::<TraceContext>().is_err());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceContext {
    /// The trace; not 0.
    pub trace: u128,
    /// The span; not 0.
    pub span: u64,
    /// Whether the trace is collected at all.
    pub sampled: bool,
}

impl TraceContext {
    /// The header's name.
    pub const HEADER: &str = "traceparent";

    /// A new trace of a room: its number is the room's, so that whoever has a room id finds the trace, and both sides
    /// are in one even when nobody told them.
    #[must_use]
    pub fn of_room(room: RoomId) -> Self {
        let trace = if room.0 == 0 { u128::from(draw()) } else { room.0 };
        Self { trace, span: draw(), sampled: true }
    }

    /// Another span of the same trace.
    #[must_use]
    pub fn child(self) -> Self {
        Self { span: draw(), ..self }
    }

    /// What a request says it belongs to. A header that makes no sense is none.
    pub(crate) fn from_headers(headers: &HeaderMap) -> Option<Self> {
        headers.get(Self::HEADER)?.to_str().ok()?.parse().ok()
    }
}

/// A number that is not 0 and that nobody else draws.
fn draw() -> u64 {
    RandomState::new().build_hasher().finish().max(1)
}

impl FromStr for TraceContext {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong =
            || format!("{text:?} is not a traceparent: 00-TRACE-SPAN-FLAGS in lower-case hexadecimal digits");
        let digits = |part: &str, len: usize| {
            part.len() == len && part.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
        };
        let mut parts = text.splitn(5, '-');
        let mut part = |len| parts.next().filter(|part| digits(part, len)).ok_or_else(wrong);
        let (version, trace, span, flags) = (part(2)?, part(32)?, part(16)?, part(2)?);
        // Later versions may add parts; this one has none.
        if version == "ff" || (version == "00" && parts.next().is_some()) {
            return Err(wrong());
        }
        let trace = u128::from_str_radix(trace, 16).map_err(|_| wrong())?;
        let span = u64::from_str_radix(span, 16).map_err(|_| wrong())?;
        let flags = u8::from_str_radix(flags, 16).map_err(|_| wrong())?;
        if trace == 0 || span == 0 {
            return Err(wrong());
        }
        Ok(Self { trace, span, sampled: flags & 1 == 1 })
    }
}

impl fmt::Display for TraceContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "00-{:032x}-{:016x}-{:02x}", self.trace, self.span, u8::from(self.sampled))
    }
}

/// A value that a span carries.
#[derive(Clone, Debug, PartialEq)]
pub enum SpanValue {
    /// A number of things.
    Count(u64),
    /// A time.
    Seconds(f64),
    /// A name.
    Text(String),
}

/// Something that took time, and is over.
#[derive(Clone, Debug, PartialEq)]
pub struct Span {
    /// The trace and the span.
    pub context: TraceContext,
    /// The span that it is part of, if any.
    pub parent: Option<u64>,
    /// Whether that one belongs to another process.
    pub remote_parent: bool,
    /// `room`, a stage, or `chunk`.
    pub name: &'static str,
    /// When it began.
    pub began: SystemTime,
    /// When it ended.
    pub ended: SystemTime,
    /// What else is known.
    pub attributes: Vec<(&'static str, SpanValue)>,
    /// Why it failed, if it did.
    pub error: Option<String>,
}

/// Somebody who collects spans. Must return at once.
pub trait TraceSink: fmt::Debug + Send + Sync {
    /// The spans of one request that is over, the outermost first.
    fn collect(&self, spans: Vec<Span>);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_the_standard_allows_is_a_traceparent() {
        let good = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00";
        assert!(!good.parse::<TraceContext>().unwrap().sampled);
        assert!(
            "01-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more".parse::<TraceContext>().is_ok()
        );
        for bad in [
            "",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7",
            "00-4BF92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more",
            "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "00-+bf92f3577b34da6a3ce929d0e0e473-600f067aa0ba902b7-01",
        ] {
            assert!(bad.parse::<TraceContext>().is_err(), "{bad}");
        }
        let (room, other) = (TraceContext::of_room(RoomId(7)), TraceContext::of_room(RoomId(7)));
        assert_eq!((room.trace, other.trace), (7, 7));
        assert_ne!(room.span, other.span);
        assert_eq!(room.child().trace, 7);
    }
}
