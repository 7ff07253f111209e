//! What the machine can do with the same bytes in the same memory, with nothing around it.

use std::{
    net::{TcpListener, TcpStream},
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use kvferry_arena::{Arena, ArenaView, Memory, Span, Stores, Wait, copy_in_turns};
use kvferry_plan::{Blame, Bytes, LayerId, Part, StridedMove, Strides, TokenRange};
use rustix::net::{
    AddressFamily, SocketFlags, SocketType, connect, socket_with,
    sockopt::{set_tcp_congestion, set_tcp_nodelay, tcp_congestion},
};

use super::world::{Case, content};
use crate::failure::Failure;

/// Bytes of one call on a socket: more does not help.
const CALL: u64 = 1 << 20;

/// The rows of all pools, one after the other, `most` bytes in all, in pieces of at most `piece`.
fn pieces(arenas: &[Arc<Arena>], most: Bytes, piece: u64) -> Result<Vec<(usize, Span)>, Failure> {
    let (mut left, mut all) = (most.0, Vec::new());
    for (i, arena) in arenas.iter().enumerate() {
        let layout = arena.layout();
        let mut at = content(arena);
        while at < layout.len().0 && left > 0 {
            let len = piece.min(layout.len().0 - at).min(left);
            all.push((i, Span { offset: Bytes(at), len: Bytes(len) }));
            (at, left) = (at + len, left - len);
        }
    }
    if left > 0 {
        return Err(Failure::new(
            Blame::Us,
            format_args!("a ceiling would move {left} bytes less than is moved"),
        ));
    }
    Ok(all)
}

/// One loopback connection that carries nothing but the bytes, from the source's pools to the target's.
pub(super) struct Loopback {
    out: OwnedFd,
    back: TcpStream,
    pub(super) congestion: String,
}

impl Loopback {
    pub(super) fn new() -> Result<Self, Failure> {
        let refused = |e| Failure::new(Blame::Environment, format_args!("loopback TCP: {e}"));
        let listener = TcpListener::bind("127.0.0.1:0").map_err(refused)?;
        let out = socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None)
            .map_err(|e| refused(e.into()))?;
        // As the transport does, before there is a connection that could be paced.
        for socket in [listener.as_fd(), out.as_fd()] {
            let _ = set_tcp_nodelay(socket, true);
            if set_tcp_congestion(socket, "cubic").is_err() {
                let _ = set_tcp_congestion(socket, "reno");
            }
        }
        connect(&out, &listener.local_addr().map_err(refused)?).map_err(|e| refused(e.into()))?;
        let (back, _) = listener.accept().map_err(refused)?;
        let congestion = tcp_congestion(&out).map_err(|e| refused(e.into()))?;
        Ok(Self { out, back, congestion })
    }

    pub(super) fn run(&self, case: &Case) -> Result<Duration, Failure> {
        let (from, to) = (pieces(&case.sources, case.bytes, CALL)?, pieces(&case.targets, case.bytes, CALL)?);
        let started = Instant::now();
        thread::scope(|scope| {
            let sender =
                scope.spawn(|| each(&from, |i, span| case.sources[i].send_to(self.out.as_fd(), &[span])));
            each(&to, |i, span| case.targets[i].receive_from(self.back.as_fd(), &[span], Wait::Socket))?;
            sender.join().map_err(|_| Failure::new(Blame::Us, "the thread that sends has died"))?
        })?;
        Ok(started.elapsed())
    }
}

/// Calls `call` until all of each span is through.
fn each(
    spans: &[(usize, Span)],
    mut call: impl FnMut(usize, Span) -> Result<usize, kvferry_arena::ArenaError>,
) -> Result<(), Failure> {
    for &(i, mut span) in spans {
        while span.len.0 > 0 {
            let moved = call(i, span)? as u64;
            if moved == 0 {
                return Err(Failure::new(Blame::Environment, "a loopback connection was closed"));
            }
            span = Span { offset: Bytes(span.offset.0 + moved), len: Bytes(span.len.0 - moved) };
        }
    }
    Ok(())
}

/// The plain copy of all rows, end to end, through the cache.
pub(super) fn memcpy(case: &Case) -> Result<Duration, Failure> {
    let from = pieces(&case.sources, case.bytes, u64::MAX)?;
    let to = pieces(&case.targets, case.bytes, u64::MAX)?;
    let started = Instant::now();
    let (mut sources, mut rest) = (from.into_iter(), None::<(usize, Span)>);
    for (target, mut span) in to {
        while span.len.0 > 0 {
            let Some((source, piece)) = rest.take().filter(|(_, s)| s.len.0 > 0).or_else(|| sources.next())
            else {
                break;
            };
            let len = Bytes(piece.len.0.min(span.len.0));
            let strides = |offset| Strides { offset, row: len, block: len };
            let (src, dst) = (strides(piece.offset), strides(span.offset));
            let whole = StridedMove { src, dst, len, rows: 1, blocks: 1, cast: None };
            case.targets[target].copy_from(&*case.sources[source], &whole, Stores::Cached)?;
            let after = |s: Span| Span { offset: Bytes(s.offset.0 + len.0), len: Bytes(s.len.0 - len.0) };
            (rest, span) = (Some((source, after(piece))), after(span));
        }
    }
    Ok(started.elapsed())
}

/// One sweep over the source's pages that copies each row to where it belongs: the copies alone, listed before.
pub(super) struct FanOut<'a> {
    case: &'a Case,
    views: Vec<ArenaView>,
    steps: Vec<Step>,
}

struct Step {
    source: usize,
    page: (LayerId, Part, u32),
    target: usize,
    m: StridedMove,
}

impl<'a> FanOut<'a> {
    pub(super) fn new(case: &'a Case) -> Result<Self, Failure> {
        let views = case
            .sources
            .iter()
            .map(|arena| ArenaView::map(arena.fd(), arena.layout().clone()))
            .collect::<Result<Vec<_>, _>>()?;
        let mut steps = Vec::new();
        for source in case.source_ranks() {
            for target in case.target_ranks() {
                let plan = case.plan(source, target, TokenRange::new(0, case.tokens))?;
                let (s, t) = (source.0 as usize, target.0 as usize);
                for unit in plan.units() {
                    let Some(layout) = case.pair.src().part(unit.part) else { continue };
                    let src = case.sources[s].region(unit.layer, unit.part)?;
                    let dst = case.targets[t].region(unit.layer, unit.part)?;
                    for (run, m) in unit.runs.iter().zip(unit.moves(src, dst)) {
                        let page = (unit.layer, unit.part, layout.page(run.src_row).0);
                        steps.push(Step { source: s, page, target: t, m });
                    }
                }
            }
        }
        steps.sort_by_key(|step| (step.source, step.page));
        Ok(Self { case, views, steps })
    }

    pub(super) fn run(&self) -> Result<Duration, Failure> {
        let started = Instant::now();
        for page in self.steps.chunk_by(|a, b| (a.source, a.page) == (b.source, b.page)) {
            let moves = page.iter().map(|step| (&*self.case.targets[step.target], &step.m));
            copy_in_turns(&self.views[page[0].source], moves, Stores::Streaming)?;
        }
        Ok(started.elapsed())
    }
}
