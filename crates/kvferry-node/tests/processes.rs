//! Instances whose ranks live in processes of their own.
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "helpers of tests"
)]

mod common;

use std::{
    io::{BufRead, BufReader, Lines, Write, stdin, stdout},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    time::Duration,
};

use common::*;
use kvferry_node::{CauseKind, PeerAddr, Receipt, RoomError, TransportKind};
use kvferry_plan::{CacheShape, Incarnation, InstanceId, RankId, RoomKey, TokenRange};

const KEY: u128 = 77;
const TOKENS: u64 = 203;
const WORKER: &str = "KVFERRY_TEST_WORKER";

const GQA: Case =
    Case { shape: || CacheShape::gqa(2, 3, 8), prefill: "tp=3,page=16", decode: "tp=1,page=16" };
const MLA: Case =
    Case { shape: || CacheShape::mla(2, 20), prefill: "tp=2,page=16", decode: "tp=4,dcp=4,page=16" };

#[derive(Clone, Copy)]
struct Case {
    shape: fn() -> CacheShape,
    prefill: &'static str,
    decode: &'static str,
}

impl Case {
    fn part(&self, name: &'static str, rank: u32, transport: TransportKind) -> Recipe {
        let spec = if name == "prefill" { self.prefill } else { self.decode };
        Recipe { hosts: Some(vec![RankId(rank)]), ..Recipe::new(name, &(self.shape)(), spec, transport) }
    }
}

fn transport(name: &str) -> TransportKind {
    EVERY.into_iter().find(|kind| kind.to_string() == name).unwrap()
}

/// Not a test of its own: what the other processes run.
#[tokio::test(flavor = "multi_thread")]
async fn worker() {
    let Ok(job) = std::env::var(WORKER) else { return };
    let [case, name, rank, kind] = job.split(' ').collect::<Vec<_>>().try_into().unwrap();
    let case = if case == "gqa" { GQA } else { MLA };
    let name = if name == "prefill" { "prefill" } else { "decode" };
    let instance = start(&case.part(name, rank.parse().unwrap(), transport(kind)));
    let addr = instance.node.addr();
    let Incarnation { started_ms, nonce } = addr.incarnation;
    say(&format!("{started_ms} {nonce} {}", addr.endpoint));
    let mut orders = stdin().lines();
    let mut order = || orders.next().unwrap().unwrap();
    let key = room(KEY);
    if name == "prefill" {
        let sending = instance.send(key, TOKENS);
        compute_and_send(&instance, &sending, TOKENS, 48);
        let sent = soon(sending.outcome()).await.unwrap();
        say(&format!("{} 0", sent.bytes.0));
    } else {
        let peers: Vec<_> = order().split(';').map(|line| address("prefill", line)).collect();
        let received = soon(instance.receive_from(key, TOKENS, peers).outcome()).await.unwrap();
        assert_eq!((received.first, received.bytes), (FIRST, received.planned_bytes));
        assert_eq!(received.transport, transport(kind));
        let wrong = instance.wrong_bytes(key, &instance.table(TOKENS), TokenRange::new(0, TOKENS));
        say(&format!("{} {wrong}", received.bytes.0));
    }
    quiet(&instance).await;
    assert_eq!(order(), "leave");
    soon(instance.node.shutdown()).await;
    say("left");
}

/// A line that is for the parent; the test harness writes others.
fn say(line: &str) {
    println!("@{line}");
    stdout().flush().unwrap();
}

fn address(instance: &str, line: &str) -> PeerAddr {
    let [ms, nonce, endpoint] = line.split(' ').collect::<Vec<_>>().try_into().unwrap();
    let incarnation = Incarnation { started_ms: ms.parse().unwrap(), nonce: nonce.parse().unwrap() };
    PeerAddr { instance: InstanceId(instance.into()), incarnation, endpoint: endpoint.into() }
}

/// A process with one rank; killed when it is dropped.
struct Rank {
    child: Child,
    orders: ChildStdin,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Rank {
    fn start(case: &str, name: &str, rank: u32, kind: TransportKind) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["worker", "--exact", "--nocapture"])
            .env(WORKER, format!("{case} {name} {rank} {kind}"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (orders, out) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        Self { child, orders, lines: BufReader::new(out).lines() }
    }

    fn says(&mut self) -> String {
        loop {
            let line = self.lines.next().expect("the process ended").unwrap();
            if let Some((_, said)) = line.split_once('@') {
                return said.to_owned();
            }
        }
    }

    fn order(&mut self, line: &str) {
        writeln!(self.orders, "{line}").unwrap();
    }

    /// Bytes moved, and bytes that are wrong.
    fn moved(&mut self) -> (u64, u64) {
        let said = self.says();
        let (bytes, wrong) = said.split_once(' ').unwrap();
        (bytes.parse().unwrap(), wrong.parse().unwrap())
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// Every rank of both instances in a process of its own: every byte exact.
fn one_process_per_rank(case: &str, sources: u32, targets: u32, kind: TransportKind) {
    let mut prefill: Vec<_> = (0..sources).map(|rank| Rank::start(case, "prefill", rank, kind)).collect();
    let mut decode: Vec<_> = (0..targets).map(|rank| Rank::start(case, "decode", rank, kind)).collect();
    let peers: Vec<_> = prefill.iter_mut().map(Rank::says).collect();
    for rank in &mut decode {
        rank.says();
        rank.order(&peers.join(";"));
    }
    let received: Vec<_> = decode.iter_mut().map(Rank::moved).collect();
    let sent: Vec<_> = prefill.iter_mut().map(Rank::moved).collect();
    assert!(received.iter().all(|(bytes, wrong)| *bytes > 0 && *wrong == 0), "{case} {kind}: {received:?}");
    let total = |moved: &[(u64, u64)]| moved.iter().map(|m| m.0).sum::<u64>();
    assert_eq!(total(&sent), total(&received), "{case} {kind}");
    for rank in prefill.iter_mut().chain(&mut decode) {
        rank.order("leave");
        assert_eq!(rank.says(), "left");
        assert!(rank.child.wait().unwrap().success());
    }
}

#[test]
fn tp3_to_tp1_with_a_process_for_each_rank() {
    for kind in [TransportKind::Tcp, TransportKind::Shm, TransportKind::MooncakeTcp] {
        one_process_per_rank("gqa", 3, 1, kind);
    }
}

#[test]
fn mla_tp2_to_dcp4_with_a_process_for_each_rank() {
    for kind in [TransportKind::Tcp, TransportKind::Shm, TransportKind::MooncakeTcp] {
        one_process_per_rank("mla", 2, 4, kind);
    }
}

fn split(transport: TransportKind) -> (Vec<Instance>, Vec<Instance>, Vec<PeerAddr>) {
    let prefill: Vec<_> = (0..2).map(|rank| start(&MLA.part("prefill", rank, transport))).collect();
    let decode: Vec<_> = (0..4).map(|rank| start(&MLA.part("decode", rank, transport))).collect();
    let peers = prefill.iter().map(|i| i.node.addr()).collect();
    (prefill, decode, peers)
}

fn cause(error: &RoomError) -> &kvferry_node::Cause {
    match error {
        RoomError::Ended { cause, .. } => cause,
        other => panic!("{other}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn when_one_process_gives_up_all_are_told_and_the_next_request_is_served() {
    for transport in EVERY {
        let (prefill, decode, peers) = split(transport);
        // At the source's end, then at the target's.
        for (n, at_source) in [(1, true), (2, false)] {
            let key: RoomKey = room(n);
            let sending: Vec<_> = prefill.iter().map(|i| i.send(key, 100)).collect();
            let receiving: Vec<_> = decode.iter().map(|i| i.receive_from(key, 100, peers.clone())).collect();
            for handle in &sending {
                handle.chunk(TokenRange::new(0, 40));
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
            if at_source {
                sending[1].abort("the client left");
            } else {
                receiving[2].abort("the client left");
            }
            let all = async {
                let mut causes = Vec::new();
                for handle in &sending {
                    causes.push(cause(&handle.outcome().await.unwrap_err()).clone());
                }
                for handle in &receiving {
                    causes.push(cause(&handle.outcome().await.unwrap_err()).clone());
                }
                causes
            };
            let causes = within(BOUND, all).await;
            assert!(causes.iter().all(|c| *c == causes[0]), "{transport}: {causes:?}");
            assert_eq!(causes[0].kind, CauseKind::Aborted);
        }
        let key = room(3);
        let sending: Vec<_> = prefill.iter().map(|i| i.send(key, 100)).collect();
        let receiving: Vec<_> = decode.iter().map(|i| i.receive_from(key, 100, peers.clone())).collect();
        for (instance, handle) in prefill.iter().zip(&sending) {
            compute_and_send(instance, handle, 100, 30);
        }
        let mut outcomes = Vec::new();
        for handle in &receiving {
            outcomes.push(soon(handle.outcome()).await);
        }
        let slowest = outcomes.iter().flatten().map(|r| r.seconds).fold(0.0, f64::max);
        let joined = Receipt::join(key, outcomes.clone()).unwrap();
        assert_eq!((joined.bytes, joined.first, joined.seconds), (joined.planned_bytes, FIRST, slowest));
        let mut sent = 0;
        for handle in &sending {
            sent += soon(handle.outcome()).await.unwrap().bytes.0;
        }
        assert_eq!(joined.bytes.0, sent, "{transport}");
        outcomes.push(Err(RoomError::ShutDown));
        assert_eq!(Receipt::join(key, outcomes), Err(RoomError::ShutDown));
        for instance in prefill.iter().chain(&decode) {
            quiet(instance).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_dies_takes_the_room_from_everybody() {
    for transport in EVERY {
        let (mut prefill, decode, peers) = split(transport);
        let key = room(1);
        let sending: Vec<_> = prefill.iter().map(|i| i.send(key, 100)).collect();
        let receiving: Vec<_> = decode.iter().map(|i| i.receive_from(key, 100, peers.clone())).collect();
        for handle in &sending {
            handle.chunk(TokenRange::new(0, 40));
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
        drop(prefill.remove(1));
        for handle in &receiving {
            let error = within(BOUND, handle.outcome()).await.unwrap_err();
            assert!(matches!(cause(&error).kind, CauseKind::Lost | CauseKind::Transport), "{error}");
        }
        let error = within(BOUND, sending[0].outcome()).await.unwrap_err();
        assert!(matches!(cause(&error).kind, CauseKind::Lost | CauseKind::Transport), "{error}");
        quiet(&prefill[0]).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_instance_that_is_not_whole_is_not_asked() {
    let (prefill, decode, peers) = split(TransportKind::Tcp);
    let ask = |n, peers: &[PeerAddr]| decode[0].receive_from(room(n), 20, peers.to_vec());
    let error = soon(ask(1, &peers[..1]).outcome()).await.unwrap_err();
    assert!(error.to_string().contains("1 of 2 ranks"), "{error}");
    let twice = start(&MLA.part("prefill", 0, TransportKind::Tcp));
    let error = soon(ask(2, &[peers.clone(), vec![twice.node.addr()]].concat()).outcome()).await.unwrap_err();
    assert!(error.to_string().contains("rank 0 lives in two"), "{error}");
    let error = soon(ask(3, &[]).outcome()).await.unwrap_err();
    assert!(error.to_string().contains("without peers"), "{error}");
    let other = start(&Recipe { spec: "tp=2,page=8", ..MLA.part("prefill", 1, TransportKind::Tcp) });
    let error = soon(ask(4, &[peers[0].clone(), other.node.addr()]).outcome()).await.unwrap_err();
    assert!(error.to_string().contains("different instances"), "{error}");
    for instance in prefill.iter().chain(&decode[..1]) {
        quiet(instance).await;
    }
}
