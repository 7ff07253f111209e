//! The rules of membership, against a naive model and one by one.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use kvferry_plan::{CacheShape, Descriptor, Dtype, Incarnation, InstanceId, PROTOCOL, Placement};
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
        descriptor: Descriptor {
            protocol: PROTOCOL,
            model: "m".into(),
            placement: Placement::single(&shape, 16, Dtype::F32),
            shape,
        },
        transports: vec!["tcp://127.0.0.1:9002".into()],
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
