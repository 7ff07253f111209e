//! Who is there and who fits whom, as far as this router knows: the registry's list, asked again and again.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use kvferry_engine::Voice;
use kvferry_plan::Blame;
use kvferry_registry::{Client, Group, Role};

use super::{
    fit::{Fits, Fitting, Served},
    seat::Seat,
};
use crate::{Problem, Stage};

/// How often the registry is asked.
const EVERY: Duration = Duration::from_millis(250);
/// For how long its last answer counts when it does not answer any more; instances live on without it.
const STALE: Duration = Duration::from_secs(30);

/// A prefill and a decode that can serve each other.
#[derive(Clone, Debug)]
pub(super) struct Match {
    pub(super) prefill: Arc<Seat>,
    pub(super) decode: Arc<Seat>,
    pub(super) fitting: Fitting,
}

/// What one answer of the registry says.
#[derive(Debug, Default)]
pub(super) struct Snapshot {
    pub(super) seats: Vec<Arc<Seat>>,
    matches: Vec<Match>,
    /// Why other pairs are none.
    refusals: Vec<Problem>,
    /// Instances of which some ranks are missing.
    partial: Vec<String>,
    /// When it came, if it did.
    at: Option<Instant>,
}

impl Snapshot {
    /// The pairs to choose from.
    ///
    /// # Errors
    /// Why there are none: nobody is there, or nobody fits, by field.
    pub(super) fn matches(&self) -> Result<Vec<&Match>, Problem> {
        let there = |found: &&Match| !found.prefill.is_gone() && !found.decode.is_gone();
        let matches: Vec<&Match> = self.matches.iter().filter(there).collect();
        if !matches.is_empty() {
            return Ok(matches);
        }
        let missing = |role| !self.seats.iter().any(|seat| seat.role == role && !seat.is_gone());
        for role in [Role::Prefill, Role::Decode] {
            if missing(role) {
                return Err(self.absent(role));
            }
        }
        let refusal = self.refusals.first().cloned();
        Err(refusal.unwrap_or_else(|| self.absent(Role::Prefill)))
    }

    /// Why other pairs of instances that are there are none.
    pub(super) fn refusals(&self) -> &[Problem] {
        &self.refusals
    }

    fn absent(&self, role: Role) -> Problem {
        let mut cause = format!("no {role} instance is there");
        let gone: Vec<_> = self
            .seats
            .iter()
            .filter(|s| s.role == role && s.is_gone())
            .map(|s| s.instance.0.as_str())
            .collect();
        if !gone.is_empty() {
            cause += &format!(" (not reached any more: {})", gone.join(", "));
        }
        if !self.partial.is_empty() {
            cause += &format!(" (not whole: {})", self.partial.join("; "));
        }
        cause += &format!("; start one with `kvferry serve --role {role}`, or try again in a moment");
        Problem::new(Blame::Environment, Stage::Lookup, cause)
    }
}

/// The registry as seen from here.
#[derive(Debug)]
pub(super) struct View {
    registry: Client,
    served: Served,
    now: Mutex<Arc<Snapshot>>,
    /// Why the registry could not be asked the last time.
    silent: Mutex<Option<String>>,
}

impl View {
    pub(super) fn new(registry: Client, voice: &Voice) -> Self {
        let served = Served { name: voice.name.clone(), sha256: voice.sha256.clone() };
        Self { registry, served, now: Mutex::default(), silent: Mutex::default() }
    }

    /// What is known now.
    ///
    /// # Errors
    /// When the registry has not answered for too long.
    pub(super) fn snapshot(&self) -> Result<Arc<Snapshot>, Problem> {
        let snapshot = Arc::clone(&lock(&self.now));
        if snapshot.at.is_some_and(|at| at.elapsed() < STALE) {
            return Ok(snapshot);
        }
        let why = lock(&self.silent).clone().unwrap_or_else(|| "the registry was not asked yet".into());
        Err(Problem::new(Blame::Environment, Stage::Lookup, why))
    }

    /// Keeps asking.
    pub(super) async fn follow(&self) {
        let mut fits = Fits::new(self.served.clone());
        loop {
            match self.registry.groups().await {
                Ok(groups) => {
                    let before = Arc::clone(&lock(&self.now));
                    // Planning takes a moment, and is done once for two starts.
                    let (snapshot, kept) = match tokio::task::spawn_blocking(move || {
                        let snapshot = look(&groups, &before, &mut fits);
                        (snapshot, fits)
                    })
                    .await
                    {
                        Ok(looked) => looked,
                        Err(error) => {
                            tracing::error!(%error, "the registry's answer could not be read; this is a defect");
                            fits = Fits::new(self.served.clone());
                            tokio::time::sleep(EVERY).await;
                            continue;
                        }
                    };
                    fits = kept;
                    *lock(&self.now) = Arc::new(snapshot);
                    *lock(&self.silent) = None;
                }
                Err(error) => *lock(&self.silent) = Some(error.to_string()),
            }
            tokio::time::sleep(EVERY).await;
        }
    }
}

fn lock<T>(what: &Mutex<T>) -> MutexGuard<'_, T> {
    // Whole values are put in.
    what.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Seats keep what they have over answers, as long as they are the same start.
fn look(groups: &[Group], before: &Snapshot, fits: &mut Fits) -> Snapshot {
    let mut snapshot = Snapshot { at: Some(Instant::now()), ..Snapshot::default() };
    for group in groups {
        if !group.is_whole() {
            snapshot.partial.push(group.to_string());
            continue;
        }
        let same = |seat: &&Arc<Seat>| {
            seat.instance == group.instance && Some(seat.incarnation) == Seat::incarnation(group)
        };
        if let Some(seat) = before.seats.iter().find(same) {
            snapshot.seats.push(Arc::clone(seat));
            continue;
        }
        match Seat::new(group) {
            Ok(Some(seat)) => {
                tracing::info!(instance = %seat.instance, role = %seat.role, "instance found");
                snapshot.seats.push(Arc::new(seat));
            }
            Ok(None) => {}
            Err(problem) => tracing::warn!(instance = %group.instance, %problem, "left out"),
        }
    }
    fits.keep(|incarnation| snapshot.seats.iter().any(|seat| seat.incarnation == incarnation));
    let of = |role| snapshot.seats.iter().filter(move |seat| seat.role == role);
    for prefill in of(Role::Prefill) {
        for decode in of(Role::Decode) {
            match fits.ask(prefill, decode) {
                Ok(fitting) => snapshot.matches.push(Match {
                    prefill: Arc::clone(prefill),
                    decode: Arc::clone(decode),
                    fitting,
                }),
                Err(problem) => snapshot.refusals.push(problem),
            }
        }
    }
    snapshot
}
