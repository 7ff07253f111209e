//! What a member says about itself, and the other JSON bodies.

use std::{fmt, net::SocketAddr, str::FromStr};

use kvferry_plan::{Blame, Descriptor, Incarnation, InstanceId};
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

/// One running instance.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    /// Its name, the same over restarts; see [`check_instance`].
    pub instance: InstanceId,
    /// This start of it.
    pub incarnation: Incarnation,
    /// What it does.
    pub role: Role,
    /// Base URL of its HTTP port, `http://127.0.0.1:PORT`.
    pub http: String,
    /// Where its hand-off control plane listens, `127.0.0.1:PORT`.
    pub control: String,
    /// Number of its ranks.
    pub ranks: u32,
    /// What it caches, and how that is laid out.
    pub descriptor: Descriptor,
    /// Data plane endpoints, such as `tcp://127.0.0.1:4711`.
    pub transports: Vec<String>,
}

impl Member {
    /// Checks what the registry relies on: the name and that both addresses are loopback.
    ///
    /// # Errors
    /// Says which field is wrong and what it should look like.
    pub fn check(&self) -> Result<(), String> {
        check_instance(&self.instance.0)?;
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

/// A refusal, as JSON.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Problem {
    /// What happened and what to do.
    pub error: String,
    /// Who can do something about it.
    pub blame: Blame,
}
