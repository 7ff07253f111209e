//! What the machines do, one behaviour at a time: findings by name, bounds by whoever is late, no trust in a peer.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "helpers of tests")]

use std::{sync::Arc, time::Duration};

use kvferry_plan::{
    Attempt, Blame, Bytes, CacheShape, Dtype, End, Generation, Incarnation, LayoutSpec, PageId, PageTable,
    Pair, PartDigest, RankId, RoomId, RoomKey, Rotation, TokenRange,
};
use kvferry_session::{
    Abort, Action, Cause, CauseKind, Closed, Deadlines, Done, Final, FirstToken, Head, Leg, Limits, Message,
    Mover, Offer, Open, PageRef, Prompt, Settled, Side, Source, SourceProcess, Target, TargetRoom, Time,
    Tombstones, Work,
};
use proptest::prelude::*;

const FIRST: FirstToken = FirstToken { token: 5, logprob: -1.0 };
const TOKENS: u64 = 16;

fn at(millis: u64) -> Time {
    Time(Duration::from_millis(millis))
}

fn room(n: u128) -> RoomKey {
    RoomKey { room: RoomId(n), attempt: Attempt(0) }
}

/// As the target sends it.
fn head() -> Head {
    let start = |nonce| Incarnation { started_ms: 9, nonce };
    Head { key: room(1), generation: Generation(4), from: start(2), to: start(1) }
}

fn place(shape: &CacheShape, spec: &str) -> kvferry_plan::Placement {
    spec.parse::<LayoutSpec>().unwrap().placement(shape, Dtype::Bf16).unwrap()
}

/// Two source ranks with a head each, to one target rank.
fn pair() -> Arc<Pair> {
    let shape = CacheShape::gqa(1, 2, 8);
    Arc::new(Pair::new(shape.clone(), place(&shape, "tp=2,page=4"), place(&shape, "tp=1,page=4")).unwrap())
}

fn target(mover: Mover, digest: bool) -> Target {
    let room = TargetRoom {
        key: head().key,
        generation: head().generation,
        from: head().from,
        sources: vec![SourceProcess {
            incarnation: head().to,
            ranks: vec![RankId(0), RankId(1)],
            pages: 8,
            slots: 0,
        }],
        targets: vec![RankId(0)],
        pair: pair(),
        tokens: TokenRange::new(0, TOKENS),
        transport: "x".into(),
        mover,
        digest,
        prompt: Some(Prompt::of(&[1; 16])),
    };
    let mut target = Target::new(room, Limits::default(), at(0));
    assert_eq!(target.poll(), Some(Action::Grant));
    target.granted(Ok(()), at(0));
    assert!(matches!(target.poll(), Some(Action::Send(Message::Open(_)))));
    target
}

fn leg(source: u32, tokens: TokenRange) -> Leg {
    let table = PageTable::identity(16);
    let end = |rank| End { rank: RankId(rank), table: &table };
    let plan = pair().plan(end(source), end(0), tokens).unwrap();
    let mut parts = Vec::new();
    for unit in plan.units() {
        PartDigest::add(&mut parts, unit.part, u64::from(source) + 77, unit.bytes());
    }
    Leg { target: RankId(0), tokens, parts, copies: plan.copies() }
}

fn offer(source: u32, tokens: TokenRange, pages: Vec<PageRef>) -> Message {
    Message::Offer(Offer {
        head: head().reply(),
        source: RankId(source),
        tokens,
        pages,
        slot: None,
        rotation: Rotation(0),
    })
}

fn manifest(source: u32, legs: Vec<Leg>) -> Message {
    Message::Final(Final { head: head().reply(), source: RankId(source), legs, first: FIRST })
}

fn refs(pages: impl IntoIterator<Item = u32>) -> Vec<PageRef> {
    pages.into_iter().map(|p| PageRef { page: PageId(p), generation: Generation(1) }).collect()
}

fn actions(mut poll: impl FnMut() -> Option<Action>) -> Vec<Action> {
    std::iter::from_fn(&mut poll).collect()
}

/// Ends the target's room and returns what it told the source.
fn told(target: &mut Target) -> Cause {
    let list = actions(|| target.poll());
    let abort = list.iter().find_map(|a| match a {
        Action::Send(Message::Abort(abort)) => Some(abort.cause.clone()),
        _ => None,
    });
    assert!(list.contains(&Action::Fence), "{list:?}");
    assert_eq!(target.outcome(), None, "not before the fence");
    target.fenced();
    let cause = target.outcome().unwrap().clone().unwrap_err();
    assert_eq!(abort.as_ref(), Some(&cause));
    let closed = Closed { head: head(), cause: Some(cause.clone()) };
    assert_eq!(actions(|| target.poll()), [Action::Send(Message::Closed(closed)), Action::Finish]);
    cause
}

const ALL: TokenRange = TokenRange { start: kvferry_plan::Token(0), end: kvferry_plan::Token(TOKENS) };

#[test]
fn a_target_is_complete_when_everything_declared_has_landed_in_any_order() {
    let mut target = target(Mover::Source, true);
    target.landed(RankId(1), Ok(leg(1, ALL)), at(1));
    target.message(&manifest(0, vec![leg(0, ALL)]), at(2));
    target.message(&offer(1, ALL, vec![]), at(3));
    target.message(&manifest(1, vec![leg(1, ALL)]), at(4));
    target.landed(RankId(0), Ok(leg(0, ALL)), at(5));
    // Twice is as good as once.
    target.landed(RankId(0), Ok(leg(0, ALL)), at(5));
    target.message(&manifest(1, vec![leg(1, ALL)]), at(5));
    assert!(target.poll().is_none(), "the offer of rank 0 is missing");
    target.message(&offer(0, ALL, vec![]), at(6));
    let bytes = pair().target_bytes(RankId(0), ALL);
    let done = Done { head: head(), bytes };
    assert_eq!(actions(|| target.poll()), [Action::Send(Message::Done(done)), Action::Fence]);
    target.fenced();
    let received = target.outcome().unwrap().clone().unwrap();
    assert_eq!((received.bytes, received.planned, received.first), (bytes, bytes, FIRST));
    assert_eq!(received.elapsed, Duration::from_millis(5));
}

#[test]
fn what_does_not_fit_is_found_by_name() {
    let half = TokenRange::new(0, TOKENS / 2);
    let mut wrong = leg(1, ALL);
    wrong.parts[0].sum ^= 1;
    let mut short = leg(1, ALL);
    short.parts[1].bytes.0 -= 4;
    let mut other = Leg { target: RankId(3), ..leg(0, ALL) };
    other.copies = 1;
    type Step = Box<dyn Fn(&mut Target)>;
    let say = |m: Message| -> Step { Box::new(move |t| t.message(&m, at(1))) };
    let land =
        |source, leg: Leg| -> Step { Box::new(move |t| t.landed(RankId(source), Ok(leg.clone()), at(1))) };
    let cases: Vec<(CauseKind, &str, Vec<Step>)> = vec![
        (
            CauseKind::Corrupt,
            "digest of part key from source rank 1 to target rank 0 differs (chunk 0..16)",
            vec![land(1, wrong.clone()), say(manifest(1, vec![leg(1, ALL)]))],
        ),
        (
            CauseKind::Corrupt,
            "digest of part key from source rank 1 to target rank 0 differs (chunk 0..16)",
            vec![say(manifest(1, vec![leg(1, ALL)])), land(1, wrong.clone())],
        ),
        (
            CauseKind::Corrupt,
            "part value from source rank 1 to target rank 0: 256 bytes declared, 252 landed (chunk 0..16)",
            vec![say(manifest(1, vec![leg(1, ALL)])), land(1, short)],
        ),
        (
            CauseKind::Corrupt,
            "source rank 1 landed tokens 0..16 at target rank 0 twice, with different content",
            vec![land(1, leg(1, ALL)), land(1, wrong.clone())],
        ),
        (
            CauseKind::Corrupt,
            "target rank 0 owns 1024 bytes of the room and got 768",
            vec![
                land(0, leg(0, half)),
                land(1, leg(1, ALL)),
                say(offer(0, half, vec![])),
                say(offer(0, TokenRange::new(8, 16), vec![])),
                say(offer(1, ALL, vec![])),
                say(manifest(0, vec![leg(0, half)])),
                say(manifest(1, vec![leg(1, ALL)])),
            ],
        ),
        (
            CauseKind::Corrupt,
            "source rank 1 landed 512 bytes of tokens 0..16 at target rank 0 and declared none",
            vec![
                land(0, leg(0, ALL)),
                land(1, leg(1, ALL)),
                say(offer(0, ALL, vec![])),
                say(offer(1, ALL, vec![])),
                say(manifest(0, vec![leg(0, ALL)])),
                say(manifest(1, vec![])),
            ],
        ),
        (
            CauseKind::Corrupt,
            "source rank 0 declared bytes for target rank 3, of 1",
            vec![say(manifest(0, vec![other]))],
        ),
        (
            CauseKind::Corrupt,
            "source rank 0 declared tokens 0..16 for target rank 0 twice",
            vec![say(manifest(0, vec![leg(0, ALL), leg(0, ALL)]))],
        ),
        (
            CauseKind::Corrupt,
            "source rank 0 sent two different manifests",
            vec![say(manifest(0, vec![])), say(manifest(0, vec![leg(0, ALL)]))],
        ),
        (CauseKind::Corrupt, "source rank 2 of an instance with 2", vec![say(manifest(2, vec![]))]),
        (
            CauseKind::Corrupt,
            "source ranks 0 and 1 name different first tokens, 5 and 6",
            vec![
                say(manifest(0, vec![])),
                say(Message::Final(Final {
                    head: head().reply(),
                    source: RankId(1),
                    legs: vec![],
                    first: FirstToken { token: 6, ..FIRST },
                })),
            ],
        ),
        (
            CauseKind::Protocol,
            "source rank 0 announced tokens 0..17",
            vec![say(offer(0, TokenRange::new(0, 17), vec![]))],
        ),
        (
            CauseKind::Protocol,
            "source rank 0 announced tokens 7..16 after tokens 0..8",
            vec![say(offer(0, half, vec![])), say(offer(0, TokenRange::new(7, 16), vec![]))],
        ),
        (CauseKind::Protocol, "source rank 9", vec![say(offer(9, half, vec![]))]),
        (
            CauseKind::Protocol,
            "sent `done` to a target",
            vec![say(Message::Done(Done { head: head().reply(), bytes: Bytes(1) }))],
        ),
    ];
    for (kind, text, steps) in cases {
        let mut target = target(Mover::Source, true);
        steps.iter().for_each(|step| step(&mut target));
        let cause = told(&mut target);
        assert_eq!((cause.kind, cause.at), (kind, Side::Source), "{cause}");
        assert!(cause.text.contains(text), "{cause} instead of {text}");
        assert_eq!(cause.blame(Side::Target), Blame::PeerMisbehaved);
    }
}

#[test]
fn without_digests_sums_are_not_compared_and_bytes_still_are() {
    let mut wrong = leg(1, ALL);
    wrong.parts[0].sum ^= 1;
    let mut target_room = target(Mover::Source, false);
    for (source, landed) in [(0, leg(0, ALL)), (1, wrong)] {
        target_room.message(&offer(source, ALL, vec![]), at(1));
        target_room.landed(RankId(source), Ok(landed), at(1));
        target_room.message(&manifest(source, vec![leg(source, ALL)]), at(1));
    }
    target_room.fenced();
    assert!(target_room.outcome().unwrap().is_ok());
}

#[test]
fn a_target_that_pulls_takes_only_pages_that_can_be() {
    let mut room = target(Mover::Target, true);
    room.message(&offer(1, ALL, refs(0..4)), at(1));
    let work = Work { rotation: Rotation(0), source: RankId(1), tokens: ALL, pages: refs(0..4), slot: None };
    assert_eq!(room.poll(), Some(Action::Execute(work)));
    room.message(&offer(1, ALL, refs(0..4)), at(1));
    assert_eq!(room.poll(), None, "a repeat is not executed again");
    room.executed(RankId(1), ALL, Ok(vec![leg(1, ALL)]), at(2));
    let settled = Settled { head: head(), source: RankId(1), tokens: ALL };
    assert_eq!(room.poll(), Some(Action::Send(Message::Settled(settled))));

    for (pages, text) in [
        (refs(0..3), "offered tokens 0..16 in 3 pages instead of 4"),
        (refs([0, 1, 8, 2]), "source page 8 of a pool of 8"),
    ] {
        let mut room = target(Mover::Target, true);
        room.message(&offer(0, ALL, pages), at(1));
        let cause = told(&mut room);
        assert_eq!(cause.kind, CauseKind::Protocol);
        assert!(cause.text.contains(text), "{cause}");
    }
}

/// Bytes that add up are not all bytes if some came twice: what lands are the chunks that were offered.
#[test]
fn chunks_that_overlap_do_not_make_up_for_one_that_is_missing() {
    let mut room = target(Mover::Source, true);
    let (most, again) = (TokenRange::new(0, 12), TokenRange::new(4, 8));
    for source in [0, 1] {
        room.message(&offer(source, ALL, vec![]), at(1));
        let legs = if source == 0 { vec![leg(0, most), leg(0, again)] } else { vec![leg(1, ALL)] };
        legs.iter().for_each(|leg| room.landed(RankId(source), Ok(leg.clone()), at(1)));
        room.message(&manifest(source, legs), at(1));
    }
    let cause = told(&mut room);
    assert_eq!(cause.kind, CauseKind::Corrupt);
    assert_eq!(cause.text, "source rank 0 landed tokens 0..12, which it did not offer so");
}

#[test]
fn a_target_waits_for_its_own_readers_before_it_lets_go() {
    let mut room = target(Mover::Target, true);
    room.message(&offer(0, ALL, refs(0..4)), at(1));
    actions(|| room.poll());
    room.abort(Cause::new(CauseKind::Aborted, Side::Target, "left"), at(2));
    room.fenced();
    assert_eq!(room.outcome(), None, "a copy is under way");
    room.executed(RankId(0), ALL, Ok(vec![leg(0, ALL)]), at(3));
    assert!(room.outcome().unwrap().is_err());
    // A fence that does not come in time is forced, once.
    let mut room = target(Mover::Target, true);
    room.abort(Cause::new(CauseKind::Aborted, Side::Target, "left"), at(0));
    actions(|| room.poll());
    room.tick(at(1999));
    assert_eq!(room.poll(), None);
    room.tick(at(2000));
    assert_eq!((room.poll(), room.poll(), room.deadline()), (Some(Action::Sever), None, None));
}

#[test]
fn messages_of_another_reservation_change_nothing() {
    let mut target = target(Mover::Source, true);
    let stale = Head { generation: Generation(3), ..head().reply() };
    let cause = Cause::new(CauseKind::Aborted, Side::Source, "old");
    target.message(&Message::Abort(Abort { head: stale, cause }), at(1));
    assert_eq!((target.poll(), target.outcome()), (None, None));
}

#[test]
fn a_target_names_what_is_late() {
    let limits = Limits::default();
    let mut silent = target(Mover::Source, true);
    assert_eq!(silent.deadline(), Some(at(0) + limits.compute), "prefill may queue and compute");
    silent.tick(at(0) + limits.compute);
    assert!(told(&mut silent).text.contains("no chunk arrived"));

    let mut missing = target(Mover::Source, true);
    missing.message(&offer(0, ALL, vec![]), at(1));
    missing.landed(RankId(0), Ok(leg(0, ALL)), at(1));
    missing.message(&offer(1, ALL, vec![]), at(1));
    missing.message(&manifest(0, vec![leg(0, ALL)]), at(2));
    missing.message(&manifest(1, vec![leg(1, ALL)]), at(3));
    let due = at(3) + limits.transfer;
    assert_eq!(missing.deadline(), Some(due));
    missing.tick(due);
    let cause = told(&mut missing);
    assert_eq!((cause.kind, cause.at), (CauseKind::Stalled, Side::Source));
    assert_eq!(cause.text, "source rank 1 declared 512 bytes for rank 0, 0 landed");

    let mut mute = target(Mover::Source, true);
    mute.message(&manifest(0, vec![]), at(1));
    mute.tick(at(1) + limits.transfer);
    assert_eq!(told(&mut mute).text, "no manifest from source ranks [1]");
}

fn source(mover: Option<Mover>) -> Source {
    let mut source = Source::new(room(1), ALL, vec![RankId(0), RankId(1)], Limits::default(), at(0));
    if let Some(mover) = mover {
        source.open(&open(ALL), mover, pair(), at(0));
    }
    source
}

fn open(tokens: TokenRange) -> Open {
    Open { head: head(), tokens, transport: "x".into(), prompt: None }
}

fn all_pages() -> Vec<Vec<PageRef>> {
    vec![refs(10..14), refs(10..14)]
}

#[test]
fn a_source_declares_what_was_executed_and_even_nothing() {
    let mut source = source(Some(Mover::Source));
    source.chunk(ALL, all_pages(), at(1));
    source.finish(FIRST, at(2));
    let list = actions(|| source.poll());
    assert_eq!(list.len(), 4, "an offer and a piece of work per rank: {list:?}");
    source.executed(RankId(0), ALL, Ok(vec![leg(0, ALL)]), at(3));
    assert_eq!(source.poll(), None, "rank 1 is still at work");
    source.executed(RankId(1), ALL, Ok(vec![]), at(4));
    let finals = |rank, legs| {
        Action::Send(Message::Final(Final { head: head().reply(), source: RankId(rank), legs, first: FIRST }))
    };
    assert_eq!(actions(|| source.poll()), [finals(0, vec![leg(0, ALL)]), finals(1, vec![])]);
    source.message(&Message::Done(Done { head: head(), bytes: Bytes(1) }), at(10));
    let sent = source.outcome().unwrap().clone().unwrap();
    assert_eq!((sent.bytes, sent.exposed), (leg(0, ALL).bytes(), Duration::from_millis(8)));
}

#[test]
fn a_source_offers_only_what_is_wanted_with_the_pages_of_it() {
    // Decode holds the first 9 tokens already.
    let mut source = Source::new(room(1), ALL, vec![RankId(0), RankId(1)], Limits::default(), at(0));
    source.chunk(TokenRange::new(0, 8), vec![refs(10..12), refs(10..12)], at(0));
    source.chunk(TokenRange::new(8, 16), vec![refs(12..14), refs(12..14)], at(0));
    source.open(&open(TokenRange::new(13, 16)), Mover::Target, pair(), at(0));
    let offers: Vec<_> = actions(|| source.poll())
        .into_iter()
        .filter_map(|a| match a {
            Action::Send(Message::Offer(offer)) => Some(offer),
            _ => None,
        })
        .collect();
    assert_eq!(offers.len(), 2);
    assert!(
        offers.iter().all(|o| o.tokens == TokenRange::new(13, 16) && o.pages == refs([13])),
        "{offers:?}"
    );
    assert!(source.leased());

    let mut greedy = self::source(None);
    greedy.open(&open(TokenRange::new(0, 17)), Mover::Target, pair(), at(0));
    let list = actions(|| greedy.poll());
    assert!(matches!(&list[0], Action::Send(Message::Abort(a)) if a.cause.at == Side::Target), "{list:?}");
}

#[test]
fn a_target_that_was_told_another_prompt_is_refused_before_anything_moves() {
    let ours = Prompt::of(&[7; 16]);
    // Other ids; a longer prompt of which the tokens here are a prefix, asked for in part and as a whole; a shorter one.
    let asked = |end| TokenRange::new(0, end);
    for (theirs, tokens) in [
        (Prompt::of(&[8; 16]), ALL),
        (Prompt::of(&[7; 17]), ALL),
        (Prompt::of(&[7; 17]), asked(17)),
        (Prompt::of(&[7; 9]), asked(9)),
    ] {
        let mut source = source(None).with_prompt(Some(ours));
        source.chunk(ALL, all_pages(), at(0));
        source.open(&Open { prompt: Some(theirs), ..open(tokens) }, Mover::Source, pair(), at(1));
        let list = actions(|| source.poll());
        let [Action::Send(Message::Abort(abort)), ..] = &list[..] else { panic!("{list:?}") };
        assert!(!list.iter().any(|a| matches!(a, Action::Send(Message::Offer(_)) | Action::Execute(_))));
        assert_eq!(abort.cause.kind, CauseKind::Mismatch);
        assert_eq!(abort.cause.blame(Side::Source), Blame::Caller);
        assert_eq!(abort.cause.blame(Side::Target), Blame::Caller);
        let text = abort.cause.to_string();
        assert!(text.contains("`prompt`") && text.contains(&theirs.to_string()), "{text}");
    }
    // The same prompt is served, and so is whoever does not say which it is.
    for theirs in [Some(ours), None] {
        let mut source = source(None).with_prompt(Some(ours));
        source.chunk(ALL, all_pages(), at(0));
        source.open(&Open { prompt: theirs, ..open(ALL) }, Mover::Source, pair(), at(1));
        assert_eq!(actions(|| source.poll()).len(), 4);
    }
}

#[test]
fn a_source_asks_before_it_ends_because_the_target_may_be_done() {
    for completed in [true, false] {
        let mut source = source(Some(Mover::Source));
        source.chunk(ALL, all_pages(), at(1));
        source.finish(FIRST, at(1));
        source.executed(RankId(0), ALL, Ok(vec![leg(0, ALL)]), at(2));
        source.executed(RankId(1), ALL, Ok(vec![leg(1, ALL)]), at(2));
        let left = Cause::new(CauseKind::Aborted, Side::Source, "left");
        source.abort(left.clone(), at(3));
        source.abort(Cause::new(CauseKind::Aborted, Side::Source, "again"), at(3));
        assert_eq!(source.outcome(), None);
        let cause = (!completed).then(|| left.clone());
        source.message(&Message::Closed(Closed { head: head(), cause }), at(4));
        assert_eq!(source.outcome().unwrap().is_ok(), completed);
    }
    // Nobody has opened it: nobody is asked.
    let mut alone = source(None);
    alone.abort(Cause::new(CauseKind::Aborted, Side::Source, "left"), at(1));
    assert!(alone.outcome().unwrap().is_err());
    // A target that does not answer has had its chance.
    let mut mute = source(Some(Mover::Target));
    mute.abort(Cause::new(CauseKind::Aborted, Side::Source, "left"), at(1));
    mute.tick(at(1) + Limits::default().fence);
    assert_eq!(mute.outcome(), None);
    mute.tick(at(1) + Limits::default().fence * 2);
    assert!(mute.outcome().unwrap().is_err());
}

#[test]
fn a_source_does_not_believe_in_a_room_that_it_has_not_declared() {
    let mut source = source(Some(Mover::Source));
    source.message(&Message::Done(Done { head: head(), bytes: Bytes(0) }), at(1));
    let list = actions(|| source.poll());
    assert!(matches!(&list[0], Action::Send(Message::Abort(a)) if a.cause.kind == CauseKind::Protocol));
}

#[test]
fn a_source_names_who_is_late() {
    let limits = Limits::default();
    let overdue = |mut source: Source, since: Time, after: Duration| {
        assert_eq!(source.deadline(), Some(since + after));
        source.tick(since + after);
        source.message(&Message::Closed(Closed { head: head(), cause: None }), since + after);
        let list = actions(|| source.poll());
        let abort = list.iter().find_map(|a| match a {
            Action::Send(Message::Abort(abort)) => Some(abort.cause.clone()),
            _ => None,
        });
        abort.or_else(|| source.outcome().and_then(|o| o.clone().err())).unwrap()
    };
    let mut unopened = source(None);
    unopened.chunk(ALL, all_pages(), at(5));
    unopened.finish(FIRST, at(5));
    let cause = overdue(unopened, at(5), limits.join);
    assert!(cause.at == Side::Target && cause.text.contains("was not opened"), "{cause}");

    let cause = overdue(source(Some(Mover::Source)), at(0), limits.compute);
    assert!(cause.at == Side::Source && cause.text.contains("no chunk was computed"), "{cause}");

    let mut pushing = source(Some(Mover::Source));
    pushing.chunk(ALL, all_pages(), at(7));
    let cause = overdue(pushing, at(7), limits.transfer);
    assert!(cause.at == Side::Target && cause.text.contains("2 pieces of work"), "{cause}");

    // A reader that gives no sign of life loses its lease, long before the engine would be late.
    let mut leased = source(Some(Mover::Target));
    leased.renew(at(3000));
    let cause = overdue(leased, at(3000), limits.lease);
    assert!(cause.at == Side::Target && cause.text.contains("lease"), "{cause}");

    let mut waiting = source(Some(Mover::Source));
    waiting.chunk(ALL, all_pages(), at(1));
    waiting.finish(FIRST, at(1));
    waiting.executed(RankId(0), ALL, Ok(vec![leg(0, ALL)]), at(2));
    waiting.executed(RankId(1), ALL, Ok(vec![leg(1, ALL)]), at(2));
    let cause = overdue(waiting, at(2), limits.transfer * 2);
    assert!(cause.at == Side::Target && cause.text.contains("no verdict"), "{cause}");
}

#[test]
fn a_lost_connection_ends_both_without_asking() {
    let lost = |at_| Cause::new(CauseKind::Lost, at_, "reset");
    let mut source = source(Some(Mover::Source));
    source.chunk(ALL, all_pages(), at(1));
    source.peer_lost(lost(Side::Target), at(2));
    assert_eq!(source.outcome(), None, "two pushes are under way");
    for rank in [0, 1] {
        let cause = Cause::new(CauseKind::Transport, Side::Target, "cancelled");
        source.executed(RankId(rank), ALL, Err(cause), at(3));
    }
    assert_eq!(source.outcome(), Some(&Err(lost(Side::Target))));

    let mut target = target(Mover::Source, true);
    target.peer_lost(head().to, lost(Side::Source), at(1));
    assert_eq!(actions(|| target.poll()), [Action::Fence]);
    target.fenced();
    assert_eq!(actions(|| target.poll()), [Action::Finish], "there is nobody to tell");
    // A room that nobody has opened does not care.
    let mut alone = self::source(None);
    alone.peer_lost(lost(Side::Target), at(1));
    assert_eq!(alone.outcome(), None);
}

#[test]
fn tombstones_answer_for_a_while_and_are_bounded() {
    let mut stones = Tombstones::new(Duration::from_secs(1), 3);
    let cause = Cause::new(CauseKind::Aborted, Side::Target, "left");
    stones.bury(room(1), Some(cause.clone()), at(0));
    stones.bury(room(1), None, at(1));
    let question = manifest(0, vec![]);
    let Some(Message::Closed(closed)) = stones.answer(&question, Side::Target) else { panic!() };
    assert_eq!((closed.head, closed.cause), (head(), Some(cause)));
    // Answers are not answered, or two dead ends would talk for ever.
    assert_eq!(stones.answer(&Message::Closed(Closed { head: head(), cause: None }), Side::Source), None);
    for n in 2..5 {
        stones.bury(room(n), None, at(2));
    }
    assert_eq!((stones.len(), stones.end(room(1))), (3, None), "the oldest went");
    let Some(Message::Closed(closed)) = stones.answer(&question, Side::Target) else { panic!() };
    assert_eq!(closed.cause.unwrap().kind, CauseKind::Unknown);
    stones.sweep(at(1001));
    assert_eq!(stones.len(), 3);
    stones.sweep(at(1002));
    assert!(stones.is_empty());
}

proptest! {
    #[test]
    fn deadlines_come_in_order_and_not_before_their_time(list in prop::collection::vec((0_u64..50, 0_u32..9), 0..40)) {
        let mut deadlines = Deadlines::default();
        list.iter().for_each(|&(t, k)| deadlines.push(at(t), k));
        let mut naive = list.clone();
        naive.sort_unstable();
        let mut popped = Vec::new();
        for now in 0..50 {
            while let Some(k) = deadlines.pop_due(at(now)) {
                popped.push((now, k));
            }
        }
        prop_assert_eq!(popped, naive);
        prop_assert_eq!(deadlines.next(), None);
    }

    #[test]
    fn entries_are_exactly_what_the_planner_reads(
        layout in 0_usize..8, start in 0_u64..60, len in 1_u64..60, rotation in 0_u32..4,
    ) {
        let shape = CacheShape::mla(1, 4);
        let specs = ["tp=1,page=4", "tp=2,dcp=2,page=4", "tp=4,dcp=4,interleave=3,page=2", "tp=3,page=16",
            "tp=4,dcp=2,interleave=8,page=3", "tp=4,shard=on,page=3", "tp=2,shard=on,page=16",
            "cp=2,tp=2,shard=on,page=5"];
        let (src, dst) = (place(&shape, specs[layout]), place(&shape, "tp=1,page=5"));
        let pair = Pair::new(shape, src, dst).unwrap();
        let tokens = TokenRange::new(start, start + len);
        let rotation = Rotation(rotation % pair.src().shard_ranks());
        let table = PageTable::rotated(rotation, 200);
        prop_assert_eq!(pair.src().rotation(&table), Ok(rotation));
        let size = u64::from(pair.src().parts[0].page_size);
        let mut of_class = std::collections::BTreeMap::<u32, std::collections::BTreeSet<u64>>::new();
        for rank in (0..pair.src().ranks()).map(RankId) {
            let end = |rank| End { rank, table: &table };
            let plan = pair.plan(end(rank), end(RankId(0)), tokens).unwrap();
            let class = pair.src().class(kvferry_plan::Part::Latent, rank);
            let rows = plan.runs().iter().flat_map(kvferry_plan::Run::expand);
            of_class.entry(class).or_default().extend(rows.map(|(_, row, _)| row.0 / size));
        }
        let ranks = (0..pair.src().ranks()).map(RankId);
        for rank in ranks.clone() {
            // Ranks of one class hold the same pages and are dealt them.
            let class = pair.src().class(kvferry_plan::Part::Latent, rank);
            let entries = pair.src().entries(rank, tokens, rotation);
            let pages = entries.iter().map(|k| u64::from(pair.src().local_page(table.0[k as usize]).0));
            prop_assert_eq!(pages.collect::<Vec<_>>(), of_class[&class].iter().copied().collect::<Vec<_>>());
            let all = ranks.clone().map(|rank| pair.src().entries(rank, tokens, rotation));
            if pair.src().shard_ranks() > 1 {
                let last = all.filter_map(|entries| entries.iter().last()).max();
                prop_assert_eq!(Some(entries.end()), last.map(|last| last + 1));
            } else {
                prop_assert_eq!(entries.end(), entries.iter().last().map_or(0, |last| last + 1));
            }
        }
    }
}
