//! One start of an instance as the router sees it: how to reach it, what it can hold, and what this router has there.

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use kvferry_plan::{Capacity, Descriptor, Fit, Hold, Incarnation, InstanceId, Need};
use kvferry_registry::{Group, Role};
use serde::Serialize;

use crate::{InstanceClient, Leg, Problem, backend::Extent};

/// How long others are preferred to an instance at which a room failed: longer than a registry's lease, after which one
/// that is dead is not listed any more.
const DOUBT: Duration = Duration::from_secs(3);

/// What this router has under way at an instance. Other routers' requests are not seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct Load {
    /// Rooms.
    pub(super) requests: u64,
    /// Prefill: prompt tokens. Decode: prompt tokens and the longest answers.
    pub(super) tokens: u64,
    /// Pages of each rank that they take.
    pub(super) pages: u32,
}

/// One start of an instance.
#[derive(Debug)]
pub(super) struct Seat {
    pub(super) instance: InstanceId,
    pub(super) incarnation: Incarnation,
    pub(super) role: Role,
    pub(super) descriptor: Descriptor,
    pub(super) capacity: Option<Capacity>,
    /// Names of its transports, in the order in which it wants them.
    pub(super) transports: Vec<String>,
    client: InstanceClient,
    load: Mutex<Load>,
    /// Nobody listens there any more, or it leaves.
    gone: AtomicBool,
    /// Until when others are preferred, after a room failed here.
    suspect: Mutex<Option<Instant>>,
}

impl Seat {
    /// The seat of an instance all of whose ranks are there. Its first process answers for all.
    pub(super) fn new(group: &Group) -> Result<Option<Self>, Problem> {
        let Some((member, incarnation)) = group.members.first().zip(Self::incarnation(group)) else {
            return Ok(None);
        };
        let scheme = |endpoint: &String| endpoint.split("://").next().unwrap_or_default().to_owned();
        Ok(Some(Self {
            instance: group.instance.clone(),
            incarnation,
            role: group.role,
            descriptor: member.descriptor.clone(),
            capacity: member.capacity.clone(),
            transports: member.transports.iter().map(scheme).collect(),
            client: InstanceClient::new(&member.http)?,
            load: Mutex::default(),
            gone: AtomicBool::new(false),
            suspect: Mutex::default(),
        }))
    }

    /// The newest start of its processes.
    pub(super) fn incarnation(group: &Group) -> Option<Incarnation> {
        group.members.iter().map(|member| member.incarnation).max()
    }

    pub(super) fn leg(&self) -> Leg {
        Leg { instance: self.instance.clone(), client: self.client.clone() }
    }

    pub(super) fn load(&self) -> Load {
        *self.lock()
    }

    pub(super) fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Relaxed)
    }

    /// Sends nobody here any more; a later start is another seat.
    pub(super) fn leave_out(&self) {
        self.gone.store(true, Ordering::Relaxed);
    }

    /// A room failed here, or at the other end: for a while others are preferred.
    pub(super) fn doubt(&self) {
        *self.suspect.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now() + DOUBT);
    }

    pub(super) fn is_doubted(&self) -> bool {
        let until = *self.suspect.lock().unwrap_or_else(PoisonError::into_inner);
        until.is_some_and(|until| Instant::now() < until)
    }

    /// When a request can be held here, by what this router knows. One that does not say what it can hold answers for
    /// itself.
    pub(super) fn fit(&self, extent: Extent) -> Fit {
        let Extent { prompt_tokens, max_tokens, ignore_eos } = extent;
        let Some(capacity) = &self.capacity else { return Fit::Now { pages: 0, max_tokens } };
        let hold = match self.role {
            Role::Decode => Hold::Continue,
            _ => Hold::Prompt(capacity.path(ignore_eos)),
        };
        let free = capacity.pages.saturating_sub(self.load().pages);
        capacity.fit(Need { hold, prompt_tokens, max_tokens }, free)
    }

    /// Counts a request until the booking is dropped.
    pub(super) fn book(self: &Arc<Self>, tokens: u64, pages: u32) -> Booking {
        let mut load = self.lock();
        load.requests += 1;
        load.tokens += tokens;
        load.pages = load.pages.saturating_add(pages);
        Booking { seat: Arc::clone(self), tokens, pages }
    }

    fn lock(&self) -> MutexGuard<'_, Load> {
        // Sums are changed in one go: a panic cannot leave half of one.
        self.load.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A request that is counted at an instance.
#[derive(Debug)]
pub(super) struct Booking {
    seat: Arc<Seat>,
    tokens: u64,
    pages: u32,
}

impl Drop for Booking {
    fn drop(&mut self) {
        let mut load = self.seat.lock();
        load.requests -= 1;
        load.tokens -= self.tokens;
        load.pages = load.pages.saturating_sub(self.pages);
    }
}
