//! What a member says about itself, and the other JSON bodies.

use std::{fmt, net::SocketAddr, str::FromStr};

use kvferry_plan::{Blame, Capacity, Descriptor, Incarnation, InstanceId, RankId};
use serde::{Deserialize, Serialize};

/// What an instance does. Other roles may come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Role {
    /// Produces tokens from handed-over caches.
    Decode,
    /// Reads prompts and hands their caches over.
    Prefill,
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Decode => "decode",
            Self::Prefill => "prefill",
        })
    }
}

/// Most ranks of an instance.
const MAX_RANKS: u32 = 4096;

/// One running process of an instance: all of it, or some of its ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    /// Its name, the same over restarts; see [`check_instance`].
    pub instance: InstanceId,
    /// This start of the process.
    pub incarnation: Incarnation,
    /// What it does.
    pub role: Role,
    /// Base URL of its HTTP port, `http://127.0.0.1:PORT`.
    pub http: String,
    /// Where its hand-off control plane listens, `127.0.0.1:PORT`.
    pub control: String,
    /// Number of ranks of the whole instance.
    pub ranks: u32,
    /// The ranks that live in this process, ascending; all of them when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hosts: Option<Vec<RankId>>,
    /// What it caches, and how that is laid out.
    pub descriptor: Descriptor,
    /// Data plane endpoints, such as `tcp://127.0.0.1:4711`.
    pub transports: Vec<String>,
    /// What it can hold, if it says so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capacity: Option<Capacity>,
}

impl Member {
    /// True when `rank` lives in this process.
    #[must_use]
    pub fn hosts(&self, rank: RankId) -> bool {
        rank.0 < self.ranks && self.hosts.as_ref().is_none_or(|hosts| hosts.contains(&rank))
    }

    /// How many ranks live in this process.
    #[must_use]
    pub fn hosted(&self) -> u32 {
        self.hosts.as_ref().map_or(self.ranks, |hosts| u32::try_from(hosts.len()).unwrap_or(u32::MAX))
    }

    /// True when a rank lives in both processes.
    pub(crate) fn overlaps(&self, other: &Self) -> bool {
        match (&self.hosts, &other.hosts) {
            (Some(hosts), _) => hosts.iter().any(|rank| other.hosts(*rank)),
            (None, Some(hosts)) => hosts.iter().any(|rank| self.hosts(*rank)),
            (None, None) => true,
        }
    }

    /// Checks what the registry relies on: the name, the ranks and that both addresses are loopback.
    ///
    /// # Errors
    /// Says which field is wrong and what it should look like.
    pub fn check(&self) -> Result<(), String> {
        check_instance(&self.instance.0)?;
        if !(1..=MAX_RANKS).contains(&self.ranks) {
            return Err(format!("ranks: {}, of 1 to {MAX_RANKS}", self.ranks));
        }
        if let Some(hosts) = &self.hosts {
            let ascending = hosts.windows(2).all(|pair| pair[0] < pair[1]);
            if hosts.is_empty() || !ascending || hosts.last().is_some_and(|last| last.0 >= self.ranks) {
                return Err(format!(
                    "hosts: name each of this process's ranks once, ascending, below {}",
                    self.ranks
                ));
            }
        }
        loopback_url(&self.http).map_err(|e| format!("http: {e}"))?;
        match SocketAddr::from_str(&self.control) {
            Ok(at) if at.ip().is_loopback() => Ok(()),
            Ok(at) => {
                Err(format!("control: {at} is not a loopback address; use 127.0.0.1:PORT or [::1]:PORT"))
            }
            Err(_) => Err(format!("control: {:?} is not ADDRESS:PORT", self.control)),
        }
    }
}

/// Checks the name of an instance: 1 to 64 letters, digits, `.`, `_` or `-`, the first a letter or digit, so that it
/// is one segment of a path.
///
/// # Errors
/// Says the rule.
///
/// ```
/// use kvferry_registry::check_instance;
/// assert!(check_instance("decode-0").is_ok());
/// assert!(check_instance("../x").unwrap_err().contains("letters"));
/// ```
pub fn check_instance(name: &str) -> Result<(), String> {
    let allowed = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    let begins = name.starts_with(|c: char| c.is_ascii_alphanumeric());
    if begins && name.len() <= 64 && name.chars().all(allowed) {
        return Ok(());
    }
    Err(format!(
        "instance {name:?} is not a name: use 1 to 64 letters, digits, `.`, `_` or `-`, beginning with a letter or digit"
    ))
}

/// The address of a loopback URL `http://127.0.0.1:PORT`; `localhost` counts as 127.0.0.1.
///
/// # Errors
/// Says what is wrong with the URL.
///
/// ```
/// use kvferry_registry::loopback_url;
/// assert_eq!(loopback_url("http://127.0.0.1:7000/").unwrap().port(), 7000);
/// assert!(loopback_url("http://10.0.0.1:7000").unwrap_err().contains("loopback"));
/// assert!(loopback_url("https://127.0.0.1:7000").is_err());
/// ```
pub fn loopback_url(url: &str) -> Result<SocketAddr, String> {
    let shape = || format!("{url:?} is not of the form http://127.0.0.1:PORT");
    let host = url.strip_prefix("http://").ok_or_else(shape)?.trim_end_matches('/');
    let host = host.strip_prefix("localhost:").map_or_else(|| host.to_owned(), |p| format!("127.0.0.1:{p}"));
    let at = SocketAddr::from_str(&host).map_err(|_| shape())?;
    if !at.ip().is_loopback() {
        return Err(format!("{url} is not a loopback address; only loopback is served"));
    }
    Ok(at)
}

/// Body of a heartbeat and of a deregistration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Heartbeat {
    /// The start that speaks.
    pub incarnation: Incarnation,
}

/// A lease was granted or renewed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Granted {
    /// How long the member counts as there without another heartbeat, in milliseconds.
    pub lease_ms: u64,
}

/// Who is there, by name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Members {
    /// The members whose lease runs.
    pub members: Vec<Member>,
}

/// One instance: those of its processes that are there and belong together.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Group {
    /// Its name.
    pub instance: InstanceId,
    /// What it does.
    pub role: Role,
    /// Number of ranks of the whole instance.
    pub ranks: u32,
    /// How many of them are there.
    pub present: u32,
    /// Its processes, by the ranks that live in them.
    pub members: Vec<Member>,
}

impl Group {
    /// True when every rank is there; before that nobody can be served.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.present >= self.ranks
    }

    /// The group that the members of one instance make: those that say the same of it as its newest start. Members
    /// of an earlier configuration wait to be replaced and count for nothing.
    pub(crate) fn of(mut members: Vec<Member>) -> Option<Self> {
        let newest = members.iter().max_by_key(|m| m.incarnation)?.clone();
        let same =
            |m: &Member| (m.role, m.ranks, &m.descriptor) == (newest.role, newest.ranks, &newest.descriptor);
        members.retain(same);
        members.sort_by_key(|m| m.hosts.as_ref().and_then(|hosts| hosts.first().copied()));
        Some(Self {
            instance: newest.instance,
            role: newest.role,
            ranks: newest.ranks,
            present: members.iter().map(Member::hosted).fold(0, u32::saturating_add),
            members,
        })
    }
}

impl fmt::Display for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} of {} ranks", self.instance, self.present, self.ranks)
    }
}

/// Every instance of which somebody is there, by name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Groups {
    /// The instances.
    pub instances: Vec<Group>,
}

/// A refusal, as JSON.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Problem {
    /// What happened and what to do.
    pub error: String,
    /// Who can do something about it.
    pub blame: Blame,
}
