//! Processes with Mooncake's engine that die under their instance: the room fails, the next one does not; and none of them
//! outlives its instance.

use std::{collections::BTreeSet, fs};

use kvferry::{plan::Blame, server::Stage};
use serde_json::Value;

use crate::{
    common::wait_until,
    fleet::{Alone, Ask, Fleet, Flight, Peer, run, settled, wait_for_quiet},
};

/// Bytes per second: 512 tokens of the built-in model.
const RATE: &str = "1048576";

/// The processes that a process has started.
fn children(parent: u32) -> BTreeSet<u32> {
    let tasks = fs::read_dir(format!("/proc/{parent}/task")).unwrap().flatten();
    let lists = tasks.filter_map(|task| fs::read_to_string(task.path().join("children")).ok());
    lists
        .flat_map(|list| list.split_whitespace().map(|pid| pid.parse().unwrap()).collect::<Vec<_>>())
        .collect()
}

fn kill(pid: u32) {
    let kill = std::process::Command::new("kill").args(["-KILL", &pid.to_string()]).status().unwrap();
    assert!(kill.success());
}

fn sidecars(peer: &Peer) -> BTreeSet<u32> {
    children(peer.server.child.id())
}

/// Without what a slot holds that is fenced off, because nobody knows what still comes to it.
fn unfenced(mut held: Value) -> Value {
    held["node"].as_object_mut().unwrap().remove("fenced_slots").unwrap();
    held["process"].as_object_mut().unwrap().remove("descriptors").unwrap();
    held
}

struct Pair {
    fleet: Fleet,
    prefill: Peer,
    decode: Peer,
    alone: Alone,
    rooms: u128,
}

impl Pair {
    fn start() -> Self {
        let fleet = Fleet::start();
        let common = ["--transport", "mooncake", "--throttle", RATE, "--chunk", "16", "--no-prefix-cache"];
        let prefill = fleet.peer("prefill", "prefill", &[&common[..], &["--layout", "tp=2"]].concat());
        let decode = fleet.peer("decode", "decode", &[&common[..], &["--layout", "tp=3"]].concat());
        Self { fleet, prefill, decode, alone: Alone::start(), rooms: 0 }
    }

    fn ask(&mut self, tokens: u32) -> Ask {
        self.rooms += 1;
        Ask::new(self.rooms, tokens, 4)
    }

    fn exact(&mut self, what: &str) {
        let ask = self.ask(200);
        let tokens = run(&self.fleet, &ask, &self.prefill, &self.decode);
        assert_eq!(tokens, Ok(self.alone.answer(&ask)), "{what}");
    }
}

/// The one that writes for prefill, then the one that is written to at decode.
pub(crate) fn killed() {
    let mut pair = Pair::start();
    let idle = sidecars(&pair.prefill);
    assert_eq!((idle.len(), sidecars(&pair.decode).len()), (1, 1));
    pair.exact("at first");
    let before = settled([&pair.prefill, &pair.decode]);
    for what in ["source", "target", "source again"] {
        let ask = pair.ask(1800);
        let landed = pair.decode.ledger().count("/node/landed");
        let flight = Flight::start(&pair.fleet.runtime, &ask, &pair.prefill, &pair.decode);
        wait_until(&format!("{what}: it moves"), || pair.decode.ledger().count("/node/landed") > landed + 2);
        let victims = match what {
            "target" => sidecars(&pair.decode),
            _ => sidecars(&pair.prefill).difference(&idle).copied().collect(),
        };
        assert_eq!(victims.len(), 1, "{what}");
        victims.into_iter().for_each(kill);
        let problem = flight.end(&pair.fleet.runtime).unwrap_err();
        // Either side may be the first to notice: one by its engine, the other by the end of the connection.
        assert_eq!(problem.stage, Stage::HandOff, "{what}: {problem}");
        // A router asks another pair then, which it does not when an instance has a defect.
        assert!(!matches!(problem.blame, Blame::Us | Blame::Caller), "{what}: {problem}");
        for peer in [&pair.prefill, &pair.decode] {
            wait_for_quiet(what, peer);
        }
        pair.exact(what);
        for (peer, before) in [&pair.prefill, &pair.decode].into_iter().zip(&before) {
            wait_until(&format!("{what}: nothing is left"), || {
                unfenced(peer.ledger().held()) == unfenced(before.clone())
            });
            assert!(peer.ledger().count("/node/fenced_slots") <= 12, "{what}");
        }
    }
}

/// However an instance ends.
pub(crate) fn orphaned() {
    for signal in ["KILL", "TERM"] {
        let mut pair = Pair::start();
        pair.exact(signal);
        let all: BTreeSet<_> = sidecars(&pair.prefill).union(&sidecars(&pair.decode)).copied().collect();
        assert_eq!(all.len(), 3);
        for peer in [&mut pair.prefill, &mut pair.decode] {
            peer.signal(signal);
            peer.server.child.wait().unwrap();
        }
        // An entry without a command line is of one that has ended.
        let runs = |pid: &u32| fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| !line.is_empty());
        wait_until("no sidecar is left", || !all.iter().any(runs));
    }
}
