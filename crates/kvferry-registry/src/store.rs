//! The rules of membership, without I/O and without a clock.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use kvferry_plan::{Blame, Incarnation, InstanceId};

use crate::{Granted, Group, Member, Role};

/// Default lease: four heartbeats.
pub const LEASE: Duration = Duration::from_secs(2);
/// How long the incarnation of a member that left is remembered, so that an older start is still refused.
const MEMORY: Duration = Duration::from_secs(600);
/// How far ahead of the registry's clock a start may claim to lie, in milliseconds.
const AHEAD_MS: u64 = 5 * 60 * 1000;
/// Processes that are remembered at a time.
const LIMIT: usize = 4096;

/// Why the registry refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// Nobody of that name is there.
    #[error("no instance `{instance}` is registered; there are: {}", names(.there))]
    Absent {
        /// The name.
        instance: InstanceId,
        /// Who is there.
        there: Vec<InstanceId>,
    },
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
    /// Too many processes.
    #[error("{LIMIT} processes are registered already; stop some, or use a second registry")]
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
    /// Some ranks of the instance are not there (yet).
    #[error(
        "instance {instance} is not ready: {present} of {ranks} ranks are there; start the others, or wait"
    )]
    Incomplete {
        /// The name.
        instance: InstanceId,
        /// How many are there.
        present: u32,
        /// How many there must be.
        ranks: u32,
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
            Self::Absent { .. }
            | Self::Changed { .. }
            | Self::Malformed(_)
            | Self::Role { .. }
            | Self::Stale { .. }
            | Self::Unknown(_) => Blame::Caller,
            Self::Full | Self::Future { .. } | Self::Incomplete { .. } => Blame::Environment,
        }
    }
}

fn names(there: &[InstanceId]) -> String {
    let names: Vec<_> = there.iter().map(|i| i.0.as_str()).collect();
    if names.is_empty() { "none".into() } else { names.join(", ") }
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

/// The members, in memory. Each rank of an instance belongs to the newest start that registered it: a process that
/// starts again takes its ranks over from its earlier start, however they were split.
#[derive(Debug)]
pub struct Store {
    lease: Duration,
    entries: BTreeMap<InstanceId, Vec<Entry>>,
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
    /// [`Refusal::Stale`] when a newer start of one of its ranks was seen, even if it has left; [`Refusal::Changed`]
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
        let known: usize = self.entries.values().map(Vec::len).sum();
        let entries = self.entries.entry(member.instance.clone()).or_default();
        let offered = member.incarnation;
        if let Some(other) = entries.iter().find(|e| e.alive(now) && e.member.role != member.role) {
            return Err(Refusal::Role {
                instance: member.instance,
                registered: other.member.role,
                offered: member.role,
            });
        }
        if entries.iter().any(|e| e.member.incarnation == offered && e.member != member) {
            return Err(Refusal::Changed { instance: member.instance, incarnation: offered });
        }
        let theirs = entries.iter().filter(|e| e.member.overlaps(&member)).map(|e| e.member.incarnation);
        match theirs.max() {
            Some(registered) if registered > offered => {
                return Err(Refusal::Stale { instance: member.instance, registered, offered });
            }
            Some(_) => entries.retain(|e| !e.member.overlaps(&member)),
            None if known >= LIMIT => return Err(Refusal::Full),
            None => {}
        }
        entries.push(Entry { until: Some(now + self.lease), seen: now, member });
        Ok(self.granted())
    }

    /// Renews the lease of a member.
    ///
    /// # Errors
    /// [`Refusal::Unknown`] when its lease ran out, it never registered, or a newer start took its ranks.
    pub fn heartbeat(
        &mut self,
        instance: &InstanceId,
        incarnation: Incarnation,
        now: Instant,
    ) -> Result<Granted, Refusal> {
        let until = now + self.lease;
        let entry = self.entry(instance, incarnation).filter(|e| e.alive(now));
        let entry = entry.ok_or_else(|| Refusal::Unknown(instance.clone()))?;
        (entry.until, entry.seen) = (Some(until), now);
        Ok(self.granted())
    }

    /// Ends the membership of one start; does nothing when another start, or nobody, has the name.
    pub fn deregister(&mut self, instance: &InstanceId, incarnation: Incarnation) {
        if let Some(entry) = self.entry(instance, incarnation) {
            entry.until = None;
        }
    }

    /// The members whose lease runs at `now`, by name.
    #[must_use]
    pub fn members(&self, now: Instant) -> Vec<Member> {
        self.entries.values().flat_map(|entries| alive(entries, now)).collect()
    }

    /// The instances of which at least one process is there, by name, whole or not.
    #[must_use]
    pub fn groups(&self, now: Instant) -> Vec<Group> {
        self.entries.values().filter_map(|entries| Group::of(alive(entries, now).collect())).collect()
    }

    /// The whole instance of that name.
    ///
    /// # Errors
    /// [`Refusal::Absent`] when nobody of it is there, [`Refusal::Incomplete`] when not all of its ranks are.
    pub fn lookup(&self, instance: &InstanceId, now: Instant) -> Result<Group, Refusal> {
        let entries = self.entries.get(instance).map(Vec::as_slice).unwrap_or_default();
        match Group::of(alive(entries, now).collect()) {
            Some(group) if group.is_whole() => Ok(group),
            Some(Group { present, ranks, .. }) => {
                Err(Refusal::Incomplete { instance: instance.clone(), present, ranks })
            }
            None => {
                let there = self.groups(now).into_iter().map(|g| g.instance).collect();
                Err(Refusal::Absent { instance: instance.clone(), there })
            }
        }
    }

    fn entry(&mut self, instance: &InstanceId, incarnation: Incarnation) -> Option<&mut Entry> {
        self.entries.get_mut(instance)?.iter_mut().find(|e| e.member.incarnation == incarnation)
    }

    fn granted(&self) -> Granted {
        Granted { lease_ms: u64::try_from(self.lease.as_millis()).unwrap_or(u64::MAX) }
    }

    fn forget(&mut self, now: Instant) {
        self.entries.retain(|_, entries| {
            entries.retain(|e| e.alive(now) || now.saturating_duration_since(e.seen) < MEMORY);
            !entries.is_empty()
        });
    }
}

fn alive(entries: &[Entry], now: Instant) -> impl Iterator<Item = Member> + '_ {
    entries.iter().filter(move |e| e.alive(now)).map(|e| e.member.clone())
}
