//! The rules of membership, against a naive model and one by one.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use kvferry_plan::{CacheShape, Descriptor, Dtype, Incarnation, InstanceId, PROTOCOL, Placement, RankId};
use kvferry_registry::{Member, Refusal, Role, Store};
use proptest::prelude::*;

const LEASE: Duration = Duration::from_secs(2);
/// The registry's clock; the starts below lie in its past.
const CLOCK_MS: u64 = 1_000_000;

fn member(name: &str, started_ms: u64, ranks: u32) -> Member {
    let shape = CacheShape::gqa(2, 2, 16);
    Member {
        instance: InstanceId(name.into()),
        incarnation: Incarnation { started_ms, nonce: 7 },
        role: Role::Prefill,
        http: "http://127.0.0.1:9000".into(),
        control: "127.0.0.1:9001".into(),
        ranks,
        hosts: None,
        descriptor: Descriptor {
            protocol: PROTOCOL,
            model: "m".into(),
            placement: Placement::single(&shape, 16, Dtype::F32),
            shape,
            converts: false,
        },
        transports: vec!["tcp://127.0.0.1:9002".into()],
        capacity: None,
    }
}

#[test]
fn an_older_start_is_refused_naming_both() {
    let (mut store, now) = (Store::new(LEASE), Instant::now());
    store.register(member("a", 20, 1), now, CLOCK_MS).unwrap();
    // Also long after the newer one fell silent.
    for at in [now, now + LEASE * 10] {
        let refused = store.register(member("a", 10, 1), at, CLOCK_MS).unwrap_err();
        let text = refused.to_string();
        assert!(text.contains("20-0000000000000007") && text.contains("10-0000000000000007"), "{text}");
    }
    store.register(member("a", 30, 1), now + LEASE * 10, CLOCK_MS).unwrap();
}

#[test]
fn one_start_says_one_thing() {
    let (mut store, now) = (Store::new(LEASE), Instant::now());
    store.register(member("a", 1, 1), now, CLOCK_MS).unwrap();
    store.register(member("a", 1, 1), now, CLOCK_MS).unwrap();
    assert!(matches!(store.register(member("a", 1, 2), now, CLOCK_MS), Err(Refusal::Changed { .. })));
    assert_eq!(store.members(now), [member("a", 1, 1)]);
}

#[test]
fn a_start_in_the_future_neither_takes_nor_blocks_a_name() {
    let (mut store, now) = (Store::new(LEASE), Instant::now());
    store.register(member("a", 20, 1), now, CLOCK_MS).unwrap();
    let ahead = CLOCK_MS + 5 * 60 * 1000;
    for start in [ahead + 1, u64::MAX] {
        let refused = store.register(member("a", start, 1), now, CLOCK_MS).unwrap_err();
        assert!(matches!(refused, Refusal::Future { .. }), "{refused}");
        assert!(refused.to_string().contains("clock"), "{refused}");
    }
    assert_eq!(store.members(now), [member("a", 20, 1)]);
    store.register(member("a", 30, 1), now, CLOCK_MS).unwrap();
    // Clocks of one machine may step a little.
    store.register(member("a", ahead, 1), now, CLOCK_MS).unwrap();
}

#[test]
fn a_name_keeps_its_role_while_its_lease_runs() {
    let (mut store, now) = (Store::new(LEASE), Instant::now());
    store.register(member("a", 1, 1), now, CLOCK_MS).unwrap();
    let decode = || Member { role: Role::Decode, ..member("a", 2, 1) };
    let refused = store.register(decode(), now, CLOCK_MS).unwrap_err();
    assert!(matches!(refused, Refusal::Role { registered: Role::Prefill, .. }), "{refused}");
    assert_eq!(store.members(now), [member("a", 1, 1)]);
    store.register(decode(), now + LEASE, CLOCK_MS).unwrap();
    assert_eq!(store.members(now + LEASE), [decode()]);
}

#[test]
fn records_that_make_no_sense_are_refused_by_field() {
    let mut store = Store::default();
    let mut refused = |change: fn(&mut Member)| {
        let mut m = member("a", 1, 1);
        change(&mut m);
        store.register(m, Instant::now(), CLOCK_MS).unwrap_err().to_string()
    };
    for name in ["a/b", "", "..", ".", "../x", "a b", "-a", "a%2f"] {
        let mut m = member("a", 1, 1);
        m.instance.0 = name.into();
        let text = Store::default().register(m, Instant::now(), CLOCK_MS).unwrap_err().to_string();
        assert!(text.starts_with("instance") && text.contains("letters"), "{text}");
    }
    assert!(refused(|m| m.http = "http://192.168.1.1:80".into()).starts_with("http:"));
    assert!(refused(|m| m.control = "0.0.0.0:80".into()).starts_with("control:"));
    assert!(refused(|m| m.control = "nowhere".into()).starts_with("control:"));
    assert!(refused(|m| m.ranks = 0).starts_with("ranks:"));
    assert!(refused(|m| m.ranks = u32::MAX).starts_with("ranks:"));
    for hosts in [vec![], vec![1], vec![0, 0]] {
        let mut m = member("a", 1, 1);
        m.hosts = Some(hosts.into_iter().map(RankId).collect());
        assert!(
            Store::default()
                .register(m, Instant::now(), CLOCK_MS)
                .unwrap_err()
                .to_string()
                .starts_with("hosts:")
        );
    }
}

/// A process that hosts some ranks of four.
fn part(name: &str, started_ms: u64, hosts: &[u32]) -> Member {
    Member {
        hosts: Some(hosts.iter().copied().map(RankId).collect()),
        control: format!("127.0.0.1:{}", 9100 + started_ms),
        ..member(name, started_ms, 4)
    }
}

#[test]
fn a_group_is_ready_when_whole_whichever_rank_came_first() {
    let (mut store, now) = (Store::new(LEASE), Instant::now());
    let a = InstanceId("a".into());
    assert_eq!(
        store.lookup(&a, now).unwrap_err().to_string(),
        "no instance `a` is registered; there are: none"
    );
    store.register(member("b", 1, 1), now, CLOCK_MS).unwrap();
    for (n, hosts) in [(3, &[3][..]), (1, &[0]), (2, &[1])] {
        assert!(store.lookup(&a, now).is_err());
        store.register(part("a", n, hosts), now, CLOCK_MS).unwrap();
        store.register(part("a", n, hosts), now, CLOCK_MS).unwrap();
    }
    let refused = store.lookup(&a, now).unwrap_err();
    assert!(matches!(refused, Refusal::Incomplete { present: 3, ranks: 4, .. }));
    assert!(refused.to_string().contains("3 of 4 ranks"), "{refused}");
    store.register(part("a", 4, &[2]), now, CLOCK_MS).unwrap();
    let group = store.lookup(&a, now).unwrap();
    let order: Vec<_> = group.members.iter().map(|m| m.incarnation.started_ms).collect();
    assert_eq!((order, group.to_string()), (vec![1, 2, 4, 3], "a: 4 of 4 ranks".into()));

    // One rank falls silent, starts again, and takes its own place only.
    let later = now + LEASE;
    for n in [1, 2, 3] {
        store
            .heartbeat(&a, Incarnation { started_ms: n, nonce: 7 }, later - Duration::from_millis(1))
            .unwrap();
    }
    let refused = store.lookup(&a, later).unwrap_err().to_string();
    assert!(refused.contains("3 of 4 ranks"), "{refused}");
    let refused = store.register(part("a", 3, &[2]), later, CLOCK_MS).unwrap_err();
    assert!(matches!(refused, Refusal::Changed { .. }), "one start has one set of ranks");
    store.register(part("a", 9, &[2]), later, CLOCK_MS).unwrap();
    assert_eq!(store.lookup(&a, later).unwrap().members.len(), 4);
    assert!(matches!(store.register(part("a", 4, &[2]), later, CLOCK_MS), Err(Refusal::Stale { .. })));
}

#[test]
fn an_instance_that_starts_again_in_another_split_is_whole_when_the_new_one_is() {
    let (mut store, now) = (Store::new(LEASE), Instant::now());
    let a = InstanceId("a".into());
    store.register(member("a", 1, 4), now, CLOCK_MS).unwrap();
    assert!(store.lookup(&a, now).unwrap().is_whole());
    store.register(part("a", 2, &[0, 1]), now, CLOCK_MS).unwrap();
    let refused = store.lookup(&a, now).unwrap_err().to_string();
    assert!(refused.contains("2 of 4 ranks"), "{refused}");
    store.register(part("a", 3, &[2, 3]), now, CLOCK_MS).unwrap();
    assert_eq!(store.lookup(&a, now).unwrap().members.len(), 2);
    // Ranks of another model do not complete each other.
    let mut other = part("a", 4, &[2, 3]);
    other.descriptor.model = "another".into();
    store.register(other, now, CLOCK_MS).unwrap();
    let refused = store.lookup(&a, now).unwrap_err().to_string();
    assert!(refused.contains("2 of 4 ranks"), "{refused}");
}

#[derive(Clone, Debug)]
enum Op {
    Beat { name: u8, start: u64 },
    Leave { name: u8, start: u64 },
    Register { name: u8, start: u64 },
    Wait { ms: u64 },
}

fn op() -> impl Strategy<Value = Op> {
    let who = (0..3_u8, 1..4_u64);
    prop_oneof![
        who.clone().prop_map(|(name, start)| Op::Beat { name, start }),
        who.clone().prop_map(|(name, start)| Op::Leave { name, start }),
        who.prop_map(|(name, start)| Op::Register { name, start }),
        (0..1500_u64).prop_map(|ms| Op::Wait { ms }),
    ]
}

proptest! {
    /// Ranks of one instance in any split: the list of registrations, each with its set of ranks as bits, start and end.
    #[test]
    fn every_rank_belongs_to_its_newest_start(
        ops in prop::collection::vec((1..16_u32, 1..30_u64, 0..900_u64), 1..40),
    ) {
        let (zero, mut store) = (Instant::now(), Store::new(LEASE));
        let mut model: Vec<(u32, u64, u64)> = Vec::new();
        let mut ms = 0;
        for (bits, start, pause) in ops {
            let now = zero + Duration::from_millis(ms);
            let hosts: Vec<_> = (0..4).filter(|r| bits & (1 << r) != 0).collect();
            let newer = model.iter().any(|(b, s, _)| b & bits != 0 && *s > start);
            let changed = model.iter().any(|(b, s, _)| *s == start && *b != bits);
            let answer = store.register(part("a", start, &hosts), now, CLOCK_MS);
            prop_assert_eq!(answer.is_ok(), !newer && !changed);
            if answer.is_ok() {
                model.retain(|(b, ..)| b & bits == 0);
                model.push((bits, start, ms + 2000));
            }
            ms += pause;
            let now = zero + Duration::from_millis(ms);
            let there: u32 =
                model.iter().filter(|(.., until)| ms < *until).map(|(b, ..)| b.count_ones()).sum();
            let present = store.groups(now).first().map_or(0, |g| g.present);
            prop_assert_eq!(present, there);
            prop_assert_eq!(store.lookup(&InstanceId("a".into()), now).is_ok(), there == 4);
        }
    }

    /// The model keeps, per name, the newest start ever registered and the end of its lease in milliseconds.
    #[test]
    fn agrees_with_a_naive_model(ops in prop::collection::vec(op(), 1..60)) {
        let (zero, mut store) = (Instant::now(), Store::new(LEASE));
        let mut model: BTreeMap<String, (u64, u64)> = BTreeMap::new();
        let (mut ms, lease) = (0_u64, 2000);
        for op in ops {
            let now = zero + Duration::from_millis(ms);
            match op {
                Op::Wait { ms: more } => ms += more,
                Op::Register { name, start } => {
                    let name = name.to_string();
                    let newest = model.get(&name).map_or(0, |m| m.0);
                    let answer = store.register(member(&name, start, 1), now, CLOCK_MS);
                    prop_assert_eq!(answer.is_ok(), start >= newest);
                    if start >= newest {
                        model.insert(name, (start, ms + lease));
                    }
                }
                Op::Beat { name, start } => {
                    let name = name.to_string();
                    let id = InstanceId(name.clone());
                    let answer = store.heartbeat(&id, Incarnation { started_ms: start, nonce: 7 }, now);
                    let alive = model.get(&name).is_some_and(|m| m.0 == start && ms < m.1);
                    prop_assert_eq!(answer.is_ok(), alive);
                    if alive {
                        model.insert(name, (start, ms + lease));
                    }
                }
                Op::Leave { name, start } => {
                    let name = name.to_string();
                    store.deregister(&InstanceId(name.clone()), Incarnation { started_ms: start, nonce: 7 });
                    if let Some(m) = model.get_mut(&name).filter(|m| m.0 == start) {
                        m.1 = 0;
                    }
                }
            }
            let now = zero + Duration::from_millis(ms);
            let there: Vec<_> = store.members(now).into_iter().map(|m| (m.instance.0, m.incarnation.started_ms)).collect();
            let expected: Vec<_> =
                model.iter().filter(|(_, m)| ms < m.1).map(|(n, m)| (n.clone(), m.0)).collect();
            prop_assert_eq!(there, expected);
        }
    }
}
