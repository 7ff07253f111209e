//! A source that deals its pages to its ranks: who has something to do, what an offer lists, and that all ranks count
//! from the same page.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "helpers of tests")]

use std::{collections::VecDeque, sync::Arc, time::Duration};

use kvferry_plan::{
    Attempt, Bytes, CacheShape, Dtype, End, Generation, Incarnation, LayoutSpec, PageId, PageTable, Pair,
    PartDigest, RankId, RoomId, RoomKey, Rotation, TokenRange,
};
use kvferry_session::{
    Action, CauseKind, Final, FirstToken, Head, Leg, Limits, Message, Mover, Offer, PageRef, Side, Source,
    SourceProcess, Target, TargetRoom, Time, Work,
};

const FIRST: FirstToken = FirstToken { token: 5, logprob: -1.0 };
const PAGE: u64 = 4;

fn at(millis: u64) -> Time {
    Time(Duration::from_millis(millis))
}

/// As the target sends it.
fn head() -> Head {
    let start = |nonce| Incarnation { started_ms: 9, nonce };
    let key = RoomKey { room: RoomId(1), attempt: Attempt(0) };
    Head { key, generation: Generation(4), from: start(2), to: start(1) }
}

fn pair(src: &str) -> Arc<Pair> {
    let shape = CacheShape::mla(1, 8);
    let place = |spec: &str| spec.parse::<LayoutSpec>().unwrap().placement(&shape, Dtype::Bf16).unwrap();
    Arc::new(Pair::new(shape.clone(), place(src), place("tp=2,page=3")).unwrap())
}

fn ranks(n: u32) -> Vec<RankId> {
    (0..n).map(RankId).collect()
}

fn target(pair: &Arc<Pair>, mover: Mover, tokens: TokenRange) -> Target {
    let room = TargetRoom {
        key: head().key,
        generation: head().generation,
        from: head().from,
        sources: vec![SourceProcess {
            incarnation: head().to,
            ranks: ranks(pair.src().ranks()),
            pages: 32,
            slots: 0,
        }],
        targets: ranks(pair.dst().ranks()),
        pair: pair.clone(),
        tokens,
        transport: "x".into(),
        mover,
        digest: true,
        prompt: None,
    };
    Target::new(room, Limits::default(), at(0))
}

fn offer(source: u32, tokens: TokenRange, rotation: u32, pages: &[u32]) -> Message {
    let pages = pages.iter().map(|page| PageRef { page: PageId(*page), generation: Generation(1) }).collect();
    let (source, rotation) = (RankId(source), Rotation(rotation));
    Message::Offer(Offer { head: head().reply(), source, tokens, pages, slot: None, rotation })
}

/// Both machines of one room, with nothing between them.
struct Room {
    pair: Arc<Pair>,
    mover: Mover,
    rotation: Rotation,
    source: Source,
    target: Target,
    /// What each side was given to do.
    worked: [Vec<Work>; 2],
    finals: Vec<Final>,
    offers: Vec<Offer>,
}

impl Room {
    fn new(src: &str, mover: Mover, rotation: u32, prompt: u64, wanted: TokenRange) -> Self {
        let (pair, rotation) = (pair(src), Rotation(rotation));
        let whole = TokenRange::new(0, prompt);
        let source = Source::new(head().key, whole, ranks(pair.src().ranks()), Limits::default(), at(0));
        let target = target(&pair, mover, wanted);
        let source = source.with_rotation(rotation);
        let (worked, finals, offers) = Default::default();
        let mut room = Self { pair, mover, rotation, source, target, worked, finals, offers };
        room.run();
        room
    }

    fn table(&self) -> PageTable {
        PageTable::rotated(self.rotation, 32)
    }

    fn legs(&self, work: &Work) -> Vec<Leg> {
        let (theirs, ours) = (self.table(), PageTable::identity(32));
        let leg = |target| {
            let (src, dst) = (End { rank: work.source, table: &theirs }, End { rank: target, table: &ours });
            let plan = self.pair.plan(src, dst, work.tokens).unwrap();
            let mut parts = Vec::new();
            plan.units().for_each(|u| PartDigest::add(&mut parts, u.part, u.first_token().0, u.bytes()));
            Leg { target, tokens: work.tokens, parts, copies: plan.copies() }
        };
        ranks(self.pair.dst().ranks()).into_iter().map(leg).collect()
    }

    /// Does everything that there is to do, at once.
    fn run(&mut self) {
        let mut todo: VecDeque<(Side, Action)> = VecDeque::new();
        loop {
            while let Some(action) = self.source.poll() {
                todo.push_back((Side::Source, action));
            }
            while let Some(action) = self.target.poll() {
                todo.push_back((Side::Target, action));
            }
            let Some((side, action)) = todo.pop_front() else { break };
            match (side, action) {
                (_, Action::Grant) => self.target.granted(Ok(()), at(1)),
                (Side::Target, Action::Send(Message::Open(open))) => {
                    self.source.open(&open, self.mover, self.pair.clone(), at(1));
                }
                (Side::Target, Action::Send(message)) => self.source.message(&message, at(1)),
                (Side::Source, Action::Send(message)) => {
                    match &message {
                        Message::Offer(offer) => self.offers.push(offer.clone()),
                        Message::Final(manifest) => self.finals.push(manifest.clone()),
                        _ => {}
                    }
                    self.target.message(&message, at(1));
                }
                (Side::Source, Action::Execute(work)) => {
                    let legs = self.legs(&work);
                    if self.mover == Mover::Source {
                        legs.iter().for_each(|l| self.target.landed(work.source, Ok(l.clone()), at(1)));
                    }
                    self.source.executed(work.source, work.tokens, Ok(legs), at(1));
                    self.worked[0].push(work);
                }
                (Side::Target, Action::Execute(work)) => {
                    let legs = self.legs(&work);
                    self.target.executed(work.source, work.tokens, Ok(legs), at(1));
                    self.worked[1].push(work);
                }
                (Side::Target, Action::Fence) => self.target.fenced(),
                (Side::Source, Action::Fence) | (_, Action::Finish) => {}
                (_, Action::Sever) => panic!("severed"),
            }
        }
    }

    /// A chunk on the pages of the table, as the pools of the ranks number them.
    fn chunk(&mut self, start: u64, end: u64) {
        let (tokens, table, src) = (TokenRange::new(start, end), self.table(), self.pair.src());
        let pages = |rank: &RankId| {
            let touched = (start / PAGE..end.div_ceil(PAGE)).map(|k| table.0[k as usize]);
            let own = touched.filter(|page| src.owner(*page) == src.class(src.parts[0].part, *rank));
            own.map(|page| PageRef { page: src.local_page(page), generation: Generation(1) }).collect()
        };
        let pages = ranks(src.ranks()).iter().map(pages).collect();
        self.source.chunk(tokens, pages, at(1));
        self.run();
    }

    fn finish(&mut self) {
        self.source.finish(FIRST, at(1));
        self.run();
    }
}

const MOVERS: [Mover; 2] = [Mover::Source, Mover::Target];

#[test]
fn one_page_to_four_ranks_is_work_for_its_owner_and_completes_with_the_word_of_all() {
    for mover in MOVERS {
        for rotation in 0..4 {
            let tokens = TokenRange::new(0, 3);
            let mut room = Room::new("tp=4,shard=on,page=4", mover, rotation, 3, tokens);
            room.chunk(0, 3);
            room.finish();
            let work: Vec<_> = room.worked[0].iter().map(|w| w.source).collect();
            assert_eq!(work, [RankId(rotation)], "{mover:?}");
            assert_eq!(room.worked[1].len(), usize::from(mover == Mover::Target));
            let said: Vec<_> = room.finals.iter().map(|f| (f.source.0, f.legs.len())).collect();
            let legs = |rank| if rank == rotation { 2 } else { 0 };
            assert_eq!(said, [0, 1, 2, 3].map(|rank| (rank, legs(rank))), "{mover:?}");
            let received = room.target.outcome().unwrap().clone().unwrap();
            assert_eq!((received.bytes, received.planned), (Bytes(2 * 3 * 16), Bytes(2 * 3 * 16)));
            assert_eq!(room.source.outcome().unwrap().clone().unwrap().bytes, received.bytes);
        }
    }
}

#[test]
fn a_room_waits_for_the_empty_manifest_of_a_rank_that_sent_nothing() {
    let tokens = TokenRange::new(0, 3);
    let mut room = target(&pair("tp=2,shard=on,page=4"), Mover::Source, tokens);
    room.granted(Ok(()), at(0));
    for source in [0, 1] {
        room.message(&offer(source, tokens, 1, &[]), at(1));
    }
    let manifest =
        |source| Message::Final(Final { head: head().reply(), source, legs: Vec::new(), first: FIRST });
    room.message(&manifest(RankId(0)), at(2));
    let due = room.deadline().unwrap();
    assert_eq!(due, at(2) + Limits::default().transfer);
    room.tick(due);
    room.fenced();
    let cause = room.outcome().unwrap().clone().unwrap_err();
    assert_eq!((cause.kind, cause.at), (CauseKind::Stalled, Side::Source));
    assert_eq!(cause.text, "no manifest from source ranks [1]");
}

#[test]
fn chunks_and_prefixes_are_cut_out_of_the_pages_that_a_rank_owns() {
    for mover in MOVERS {
        // Pages 3, 4, 5, ... from token 0 on; decode holds 18 tokens already, which is four and a half of them.
        let wanted = TokenRange::new(18, 38);
        let mut room = Room::new("tp=2,shard=on,page=4", mover, 1, 38, wanted);
        room.chunk(0, 16);
        assert!(room.offers.is_empty(), "nothing that decode wants");
        room.chunk(16, 34);
        room.chunk(34, 36);
        room.chunk(36, 38);
        room.finish();
        assert!(room.target.outcome().unwrap().is_ok());
        let offered: Vec<_> = room
            .offers
            .iter()
            .map(|o| (o.source.0, o.tokens.start.0, o.pages.iter().map(|p| p.page.0).collect::<Vec<_>>()))
            .collect();
        // Entries 4 to 9 are the logical pages 5 to 10: those of rank 1 are 5, 7 and 9, its pages 2, 3 and 4.
        let pages = |list: &[u32]| if mover == Mover::Target { list.to_vec() } else { Vec::new() };
        let expected = [
            (0, 18, pages(&[3, 4])),
            (1, 18, pages(&[2, 3, 4])),
            (0, 34, pages(&[])),
            (1, 34, pages(&[4])),
            (0, 36, pages(&[5])),
            (1, 36, pages(&[])),
        ];
        assert_eq!(offered, expected, "{mover:?}");
        let worked: Vec<_> = room.worked[0].iter().map(|w| (w.source.0, w.tokens.start.0)).collect();
        assert_eq!(worked, [(0, 18), (1, 18), (1, 34), (0, 36)]);
    }
}

#[test]
fn all_ranks_count_from_the_same_page() {
    let tokens = TokenRange::new(0, 8);
    let refused = |src: &str, offers: &[(u32, u32)]| {
        for mover in MOVERS {
            let mut room = target(&pair(src), mover, tokens);
            room.granted(Ok(()), at(0));
            for (source, rotation) in offers {
                let pages: &[u32] = if mover == Mover::Target { &[3] } else { &[] };
                room.message(&offer(*source, tokens, *rotation, pages), at(1));
                if mover == Mover::Target {
                    room.executed(RankId(*source), tokens, Ok(Vec::new()), at(1));
                }
            }
            room.fenced();
            let cause = room.outcome().unwrap().clone().unwrap_err();
            assert_eq!((cause.kind, cause.at), (CauseKind::Protocol, Side::Source), "{mover:?}: {cause}");
            let last = offers.last().unwrap();
            let text = format!("source rank {} offered rotation {}", last.0, last.1);
            assert!(cause.text.starts_with(&text), "{cause}");
        }
    };
    refused("tp=2,shard=on,page=4", &[(0, 1), (1, 0)]);
    refused("tp=2,shard=on,page=4", &[(0, 2)]);
    refused("tp=2,shard=on,page=4", &[(0, u32::MAX)]);
    refused("tp=2,page=4", &[(0, 1)]);
}

#[test]
fn an_offer_lists_the_pages_that_its_rank_owns_and_no_others() {
    let tokens = TokenRange::new(0, 12);
    for (source, pages, found) in [
        (0, &[1][..], "in 1 pages instead of 2"),
        (1, &[1, 2], "in 2 pages instead of 1"),
        // 32 logical pages are 16 of each rank.
        (1, &[16], "source page 16 of a pool of 16"),
    ] {
        let mut room = target(&pair("tp=2,shard=on,page=4"), Mover::Target, tokens);
        room.granted(Ok(()), at(0));
        room.message(&offer(source, tokens, 0, pages), at(1));
        room.fenced();
        let cause = room.outcome().unwrap().clone().unwrap_err();
        assert!(cause.kind == CauseKind::Protocol && cause.text.contains(found), "{cause}");
    }
}
