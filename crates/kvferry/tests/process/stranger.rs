//! A hand-off node in this process that says of its cache what no instance of the binary says.

use std::{sync::Arc, time::Duration};

use kvferry::{
    arena::Arena,
    node::{Node, NodeConfig, Receive, ReceiveHandle, SourceHandle, SourceRoom, TransportKind},
    plan::{Descriptor, InstanceId, PageTable, PoolLayout, PoolSize, RankId, TokenRange},
    registry::{Client, Member, Registration, Role},
    session::Prompt,
};

use crate::{
    common::wait_until,
    fleet::{Ask, Fleet, Peer},
};

/// Pages of each rank's pool.
const PAGES: u32 = 64;

pub(crate) struct Stranger<'a> {
    fleet: &'a Fleet,
    node: Arc<Node>,
    /// It is known as long as this lives.
    registration: Registration,
}

impl<'a> Stranger<'a> {
    /// Starts one that resembles `like` but for what `change` does, and waits until whoever asks finds it.
    pub(crate) fn start(
        fleet: &'a Fleet,
        (role, name): (Role, &str),
        like: &Peer,
        change: impl FnOnce(&mut Descriptor),
    ) -> Self {
        let _in_runtime = fleet.runtime.enter();
        let registry = Client::new(&fleet.registry.url).unwrap();
        let known = fleet.runtime.block_on(registry.lookup(&like.name())).unwrap();
        let mut descriptor = known.members[0].descriptor.clone();
        change(&mut descriptor);
        let Descriptor { shape, placement, .. } = &descriptor;
        let pool = |rank| {
            let size = PoolSize { pages: PAGES, slots: 0 };
            let layout = PoolLayout::with_slots(shape, placement, RankId(rank), size).unwrap();
            Arc::new(Arena::new(name, layout).unwrap())
        };
        let ranks = placement.ranks();
        let node = Node::start(NodeConfig {
            instance: InstanceId(name.to_owned()),
            incarnation: None,
            bind: "127.0.0.1:0".parse().unwrap(),
            arenas: (0..ranks).map(pool).collect(),
            descriptor: descriptor.clone(),
            hosts: None,
            transports: vec![TransportKind::Tcp],
            digest: true,
            inject: None,
            fault: None,
            limits: kvferry::node::Limits::default(),
        })
        .unwrap();
        let registration = registry.keep(Member {
            instance: node.instance().clone(),
            incarnation: node.incarnation(),
            role,
            // Nobody asks here.
            http: "http://127.0.0.1:1".into(),
            control: node.endpoint(),
            ranks,
            hosts: None,
            descriptor,
            transports: node.transports().into_iter().map(|(_, endpoint)| endpoint).collect(),
            capacity: None,
        });
        let known = fleet.runtime.block_on(async {
            tokio::time::timeout(Duration::from_secs(20), registration.registered()).await
        });
        known.unwrap().unwrap();
        Self { fleet, node, registration }
    }

    pub(crate) fn name(&self) -> InstanceId {
        self.node.instance().clone()
    }

    /// Wants a prompt's cache from a prefill instance.
    pub(crate) fn receive(&self, ask: &Ask, prefill: &Peer) -> ReceiveHandle {
        let registry = Client::new(&self.fleet.registry.url).unwrap();
        let prefill = self.fleet.runtime.block_on(registry.lookup(&prefill.name())).unwrap();
        let address = |member: Member| kvferry::node::PeerAddr {
            instance: member.instance,
            incarnation: member.incarnation,
            endpoint: member.control,
        };
        self.node.receive(Receive {
            key: ask.key(),
            peers: prefill.members.into_iter().map(address).collect(),
            table: PageTable::identity(PAGES),
            slot: None,
            tokens: TokenRange::new(0, ask.prompt.len() as u64),
            prompt: Some(Prompt::of(&ask.prompt)),
            transport: None,
        })
    }

    /// Has a prompt's cache for whoever opens the room.
    pub(crate) fn send(&self, ask: &Ask) -> SourceHandle {
        self.node.send(SourceRoom {
            key: ask.key(),
            table: PageTable::identity(PAGES),
            slot: None,
            tokens: TokenRange::new(0, ask.prompt.len() as u64),
            prompt: Some(Prompt::of(&ask.prompt)),
        })
    }

    /// Waits until it holds nothing of any room, and leaves.
    pub(crate) fn end(self) {
        wait_until("the stranger is quiet", || self.node.ledger().is_quiet());
        let _ = self.fleet.runtime.block_on(self.registration.leave());
        self.fleet.runtime.block_on(self.node.shutdown());
    }
}
