//! Two instances meet: may they serve each other, and as what?

use alloc::{
    format,
    string::{String, ToString},
    sync::Arc,
    vec::Vec,
};
use kvferry_plan::{
    Axis, Descriptor, Incarnation, InstanceId, Mismatch, Pair, PartLayout, Placement, PoolLayout, RankId,
    TokenMap,
};

use crate::{Capabilities, Choice, Endpoint, Hello, Message, Refuse, Side, choices};

/// A peer that has been found to fit: what stays of the two hellos.
#[derive(Clone, Debug)]
pub struct Peer {
    /// The peer's name.
    pub instance: InstanceId,
    /// The peer's start.
    pub incarnation: Incarnation,
    /// Our start.
    pub ours: Incarnation,
    /// Which side we are.
    pub side: Side,
    /// What the peer caches and how.
    pub descriptor: Arc<Descriptor>,
    /// Source and target placement.
    pub pair: Arc<Pair>,
    /// Pages that requests can own at the peer, as its [`Hello::pages`].
    pub pages: u32,
    /// State slots of each of the peer's pools.
    pub slots: u32,
    /// The ranks of its instance that live in the peer's process.
    pub ranks: Vec<RankId>,
    /// The transports that both have, the best first, as [`choices`] says, with the peer's addresses.
    pub transports: Vec<(Choice, Endpoint)>,
    /// Digests are taken.
    pub digest: bool,
}

/// Why two instances do not serve each other.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PairingError {
    /// We refuse, naming the field; tell the peer with [`PairingError::refusal`].
    #[error("refused the peer: {0}")]
    Refused(Mismatch),
    /// The peer refuses us. The mismatch is turned to our view.
    #[error("the peer refused: {0}")]
    RefusedByPeer(Mismatch),
    /// The first message was neither a hello nor a refusal.
    #[error("the first message was `{0}`, not `hello`")]
    NotHello(&'static str),
}

impl PairingError {
    /// The field in which the two differ.
    #[must_use]
    pub fn mismatch(&self) -> Option<&Mismatch> {
        match self {
            Self::Refused(m) | Self::RefusedByPeer(m) => Some(m),
            Self::NotHello(_) => None,
        }
    }

    /// What to tell the peer before the connection is closed.
    #[must_use]
    pub fn refusal(&self) -> Option<Message> {
        match self {
            Self::Refused(m) => Some(Message::Refuse(Refuse { mismatch: m.clone() })),
            Self::RefusedByPeer(_) | Self::NotHello(_) => None,
        }
    }

    /// Who is at fault.
    #[must_use]
    pub fn blame(&self) -> kvferry_plan::Blame {
        match self {
            Self::Refused(_) | Self::RefusedByPeer(_) => kvferry_plan::Blame::PeerIncompatible,
            Self::NotHello(_) => kvferry_plan::Blame::PeerMisbehaved,
        }
    }
}

/// One handshake. Send [`Pairing::hello`], then give [`Pairing::answer`] the peer's first message.
#[derive(Clone, Debug)]
pub struct Pairing {
    hello: Hello,
    side: Side,
    expected: Option<(InstanceId, Incarnation)>,
}

impl Pairing {
    /// The handshake of an instance that is `side` on this connection. A side that dialled an address expects
    /// the instance and the start that the address was published for.
    #[must_use]
    pub fn new(hello: Hello, side: Side, expected: Option<(InstanceId, Incarnation)>) -> Self {
        Self { hello, side, expected }
    }

    /// Our first message.
    #[must_use]
    pub fn hello(&self) -> Message {
        Message::Hello(self.hello.clone())
    }

    /// Decides on the peer's first message.
    ///
    /// # Errors
    /// [`PairingError`]; the connection ends, nothing else does.
    pub fn answer(&self, message: Message) -> Result<Peer, PairingError> {
        match message {
            Message::Hello(hello) => self.compare(hello).map_err(PairingError::Refused),
            Message::Refuse(Refuse { mismatch: Mismatch { field, ours, theirs } }) => {
                Err(PairingError::RefusedByPeer(Mismatch { field, ours: theirs, theirs: ours }))
            }
            other => Err(PairingError::NotHello(other.name())),
        }
    }

    fn compare(&self, peer: Hello) -> Result<Peer, Mismatch> {
        let ours = &self.hello;
        if let Some((instance, incarnation)) = &self.expected {
            differ("instance", instance, &peer.instance)?;
            differ("incarnation", incarnation, &peer.incarnation)?;
        }
        let source = match self.side {
            Side::Source => &ours.descriptor,
            Side::Target => &peer.descriptor,
        };
        let dtypes = source.dtypes();
        ours.descriptor.compare(&peer.descriptor, dtypes)?;
        let on = |h: &Hello| if h.capabilities.has(Capabilities::DIGEST) { "on" } else { "off" };
        differ("digest", &on(ours), &on(&peer))?;

        self.check_layers(&peer)?;
        let shape = ours.descriptor.shape.clone();
        let (mine, theirs) = (ours.descriptor.placement.clone(), peer.descriptor.placement.clone());
        let (src, dst) = match self.side {
            Side::Source => (&mine, &theirs),
            Side::Target => (&theirs, &mine),
        };
        self.check_sharding(src, dst)?;
        let pair = Pair::with(shape, src.clone(), dst.clone(), dtypes).map_err(|unsupported| Mismatch {
            field: unsupported.axis.to_string(),
            ours: describe(unsupported.axis, &mine),
            theirs: format!("{} ({})", describe(unsupported.axis, &theirs), unsupported.reason),
        })?;
        self.check_pool(&pair, peer.pages)?;
        check_hosts(&peer)?;
        let ranks = peer.ranks();

        let (ours_names, theirs_names) = (names(&ours.transports), names(&peer.transports));
        let (prefill, decode) = match self.side {
            Side::Source => (&ours_names, &theirs_names),
            Side::Target => (&theirs_names, &ours_names),
        };
        let at = |name: &str| peer.transports.iter().find(|e| e.name == name).cloned();
        let transports: Vec<_> =
            choices(prefill, decode).into_iter().filter_map(|c| at(c.transport).map(|e| (c, e))).collect();
        if transports.is_empty() {
            let (ours, theirs) = (ours_names.join("+"), theirs_names.join("+"));
            return Err(Mismatch { field: "transports".into(), ours, theirs });
        }
        Ok(Peer {
            instance: peer.instance,
            incarnation: peer.incarnation,
            ours: ours.incarnation,
            side: self.side,
            descriptor: Arc::new(peer.descriptor),
            pair: Arc::new(pair),
            pages: peer.pages,
            slots: peer.slots.unwrap_or(0),
            ranks,
            transports,
            digest: ours.capabilities.has(Capabilities::DIGEST),
        })
    }

    /// Stages that list a layer twice, or layers that the model does not have, could be made arbitrarily long.
    fn check_layers(&self, peer: &Hello) -> Result<(), Mismatch> {
        let mut layers: Vec<_> =
            self.hello.descriptor.shape.parts.iter().flat_map(|p| p.layers.iter().copied()).collect();
        layers.sort_unstable();
        layers.dedup();
        let listed: usize = peer.descriptor.placement.stages.iter().map(Vec::len).sum();
        if listed == layers.len() {
            return Ok(());
        }
        Err(Mismatch {
            field: "stages".into(),
            ours: format!("{} layers", layers.len()),
            theirs: format!("{listed} layers in its pipeline stages"),
        })
    }

    /// A source may deal its pages to its ranks, all parts alike: then an offer's pages are those that its rank owns. A
    /// target may not: the tables of both sides would decide who has what, and no message carries the target's.
    fn check_sharding(&self, src: &Placement, dst: &Placement) -> Result<(), Mismatch> {
        let sharded = |part: &&PartLayout| matches!(part.tokens, TokenMap::PageSharded { .. });
        let rows = || src.parts.iter().filter(|part| !part.part.is_state());
        let (part, source, target) = if let Some(part) = dst.parts.iter().find(sharded) {
            let fix = "page-sharded, which only prefill may be: leave `shard=on` out of decode's layout";
            (part.part, "any", fix)
        } else if let Some(part) = rows().find(|part| !sharded(part))
            && rows().any(|part| sharded(&part))
        {
            (part.part, "not page-sharded as its other parts are: shard all of them, or none", "any")
        } else {
            return Ok(());
        };
        let (ours, theirs) = match self.side {
            Side::Source => (source, target),
            Side::Target => (target, source),
        };
        Err(Mismatch { field: format!("{part}.tokens"), ours: ours.into(), theirs: theirs.into() })
    }

    /// A peer whose pools would not fit an address space would make later arithmetic overflow.
    fn check_pool(&self, pair: &Pair, pages: u32) -> Result<(), Mismatch> {
        let placement = match self.side {
            Side::Source => pair.dst(),
            Side::Target => pair.src(),
        };
        for rank in (0..placement.ranks()).map(RankId) {
            PoolLayout::new(pair.shape(), placement, rank, pages).map_err(|e| Mismatch {
                field: "pages".into(),
                ours: self.hello.pages.to_string(),
                theirs: format!("{pages} ({e})"),
            })?;
        }
        Ok(())
    }
}

fn names(list: &[Endpoint]) -> Vec<&str> {
    list.iter().map(|e| e.name.as_str()).collect()
}

/// What a placement has on an axis.
fn describe(axis: Axis, placement: &Placement) -> String {
    match axis {
        Axis::ContextParallel => format!("cp {}", placement.cp),
        Axis::HostTier => match placement.host_pages {
            Some(pages) => format!("{pages} pages in host memory"),
            None => "none".into(),
        },
        _ => format!("{} stages x cp {} x tp {}", placement.stages.len(), placement.cp, placement.tp),
    }
}

/// Ranks that are named must be some of the instance's, each once.
fn check_hosts(peer: &Hello) -> Result<(), Mismatch> {
    let ranks = peer.descriptor.placement.ranks();
    let Some(hosts) = &peer.hosts else { return Ok(()) };
    let ascending = hosts.windows(2).all(|pair| matches!(pair, [a, b] if a < b));
    if ascending && hosts.last().is_some_and(|last| last.0 < ranks) {
        return Ok(());
    }
    Err(Mismatch {
        field: "hosts".into(),
        ours: format!("some of {ranks} ranks, ascending"),
        theirs: format!("{:?}", hosts.iter().take(8).map(|r| r.0).collect::<Vec<_>>()),
    })
}

fn differ<T: PartialEq + ToString>(field: &str, ours: &T, theirs: &T) -> Result<(), Mismatch> {
    if ours == theirs {
        return Ok(());
    }
    Err(Mismatch { field: String::from(field), ours: ours.to_string(), theirs: theirs.to_string() })
}
