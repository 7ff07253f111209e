//! The rules of membership, without I/O and without a clock.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use kvferry_plan::{Blame, Incarnation, InstanceId};

use crate::{Granted, Member, Role};

/// Default lease: four heartbeats.
pub const LEASE: Duration = Duration::from_secs(2);
/// How long the incarnation of a member that left is remembered, so that an older start is still refused.
const MEMORY: Duration = Duration::from_secs(600);
/// How far ahead of the registry's clock a start may claim to lie, in milliseconds.
const AHEAD_MS: u64 = 5 * 60 * 1000;
/// Names that are remembered at a time.
const LIMIT: usize = 4096;

/// Why the registry refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// One start said two different things.
    #[error(
        "instance {instance} with incarnation {incarnation} is registered with another record; \
         a process that changes must start again"
    )]
    Changed {
        /// The name.
        instance: InstanceId,
        /// The start.
        incarnation: Incarnation,
    },
    /// Too many names.
    #[error("{LIMIT} instances are registered already; stop some, or use a second registry")]
    Full,
    /// A start that lies in the future would keep every later one out.
    #[error(
        "instance {instance} claims to have started {} s after the registry's clock; set the clock of the machine and \
         start it again",
        ahead.as_secs()
    )]
    Future {
        /// The name.
        instance: InstanceId,
        /// By how much.
        ahead: Duration,
    },
    /// The record makes no sense.
    #[error("{0}")]
    Malformed(String),
    /// The name belongs to an instance that does something else.
    #[error(
        "instance {instance} is registered as {registered} and its lease runs; {offered} needs another name, or has to \
         wait until it is gone"
    )]
    Role {
        /// The name.
        instance: InstanceId,
        /// What the member does.
        registered: Role,
        /// What the one that asked does.
        offered: Role,
    },
    /// A newer start of the same name was seen.
    #[error(
        "instance {instance} is registered with incarnation {registered}; the older incarnation {offered} is \
         refused: stop the older process, or give it another name"
    )]
    Stale {
        /// The name.
        instance: InstanceId,
        /// The newest start seen.
        registered: Incarnation,
        /// The start that asked.
        offered: Incarnation,
    },
    /// Nobody of that name and start has a running lease.
    #[error("instance {0} is not registered, or its lease ran out; register again")]
    Unknown(InstanceId),
}

impl Refusal {
    /// Who can do something about it.
    #[must_use]
    pub fn blame(&self) -> Blame {
        match self {
            Self::Changed { .. }
            | Self::Malformed(_)
            | Self::Role { .. }
            | Self::Stale { .. }
            | Self::Unknown(_) => Blame::Caller,
            Self::Full | Self::Future { .. } => Blame::Environment,
        }
    }
}

#[derive(Debug)]
struct Entry {
    member: Member,
    /// End of the lease; `None` after the member left.
    until: Option<Instant>,
    /// When it was last heard of.
    seen: Instant,
}

impl Entry {
    fn alive(&self, now: Instant) -> bool {
        self.until.is_some_and(|until| now < until)
    }
}

/// The members, in memory.
#[derive(Debug)]
pub struct Store {
    lease: Duration,
    entries: BTreeMap<InstanceId, Entry>,
}

impl Default for Store {
    fn default() -> Self {
        Self::new(LEASE)
    }
}

impl Store {
    /// An empty store that grants leases of `lease`.
    #[must_use]
    pub fn new(lease: Duration) -> Self {
        Self { lease, entries: BTreeMap::new() }
    }

    /// Registers `member`, or renews it when the same record is there already. `clock_ms` is the registry's clock in
    /// milliseconds since 1970, which starts are measured against; leases run by `now`.
    ///
    /// # Errors
    /// [`Refusal::Stale`] when a newer start of that name was seen, even if it has left; [`Refusal::Changed`]
    /// when the same start registered something else; [`Refusal::Role`] when a member of another role has the name;
    /// [`Refusal::Future`] when the start lies more than five minutes ahead; [`Refusal::Malformed`];
    /// [`Refusal::Full`].
    pub fn register(&mut self, member: Member, now: Instant, clock_ms: u64) -> Result<Granted, Refusal> {
        member.check().map_err(Refusal::Malformed)?;
        let ahead = member.incarnation.started_ms.saturating_sub(clock_ms);
        if ahead > AHEAD_MS {
            return Err(Refusal::Future { instance: member.instance, ahead: Duration::from_millis(ahead) });
        }
        self.forget(now);
        if let Some(entry) = self.entries.get(&member.instance) {
            if entry.alive(now) && member.role != entry.member.role {
                return Err(Refusal::Role {
                    instance: member.instance,
                    registered: entry.member.role,
                    offered: member.role,
                });
            }
            let registered = entry.member.incarnation;
            if member.incarnation < registered {
                return Err(Refusal::Stale {
                    instance: member.instance,
                    registered,
                    offered: member.incarnation,
                });
            }
            if member.incarnation == registered && member != entry.member {
                return Err(Refusal::Changed { instance: member.instance, incarnation: registered });
            }
        } else if self.entries.len() >= LIMIT {
            return Err(Refusal::Full);
        }
        let entry = Entry { until: Some(now + self.lease), seen: now, member };
        self.entries.insert(entry.member.instance.clone(), entry);
        Ok(self.granted())
    }

    /// Renews the lease of a member.
    ///
    /// # Errors
    /// [`Refusal::Unknown`] when its lease ran out or it never registered, [`Refusal::Stale`] when a newer start
    /// took its name.
    pub fn heartbeat(
        &mut self,
        instance: &InstanceId,
        incarnation: Incarnation,
        now: Instant,
    ) -> Result<Granted, Refusal> {
        let unknown = || Refusal::Unknown(instance.clone());
        let until = now + self.lease;
        let entry = self.entries.get_mut(instance).ok_or_else(unknown)?;
        let registered = entry.member.incarnation;
        if incarnation < registered {
            return Err(Refusal::Stale { instance: instance.clone(), registered, offered: incarnation });
        }
        if incarnation != registered || !entry.alive(now) {
            return Err(unknown());
        }
        (entry.until, entry.seen) = (Some(until), now);
        Ok(self.granted())
    }

    /// Ends the membership of one start; does nothing when another start, or nobody, has the name.
    pub fn deregister(&mut self, instance: &InstanceId, incarnation: Incarnation) {
        if let Some(entry) = self.entries.get_mut(instance)
            && entry.member.incarnation == incarnation
        {
            entry.until = None;
        }
    }

    /// The members whose lease runs at `now`, by name.
    #[must_use]
    pub fn members(&self, now: Instant) -> Vec<Member> {
        self.entries.values().filter(|e| e.alive(now)).map(|e| e.member.clone()).collect()
    }

    fn granted(&self) -> Granted {
        Granted { lease_ms: u64::try_from(self.lease.as_millis()).unwrap_or(u64::MAX) }
    }

    fn forget(&mut self, now: Instant) {
        self.entries.retain(|_, e| e.alive(now) || now.saturating_duration_since(e.seen) < MEMORY);
    }
}
