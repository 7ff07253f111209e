//! Asking a registry, and staying registered with it.

use std::time::Duration;

use kvferry_plan::{Blame, InstanceId};
use reqwest::{Method, StatusCode, Url};
use serde::{Serialize, de::DeserializeOwned};
use tokio::{sync::watch, task::JoinHandle, time::sleep};

use crate::{
    Granted, Group, Groups, HEARTBEAT, Heartbeat, Member, Members, Problem, loopback_http, loopback_url,
};

/// Longest wait for one answer.
const TIMEOUT: Duration = Duration::from_secs(2);

/// Why a registry could not be asked, or what it answered.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// The URL cannot be used.
    #[error("registry: {0}")]
    Address(String),
    /// The registry said no.
    #[error("registry {url}: {error}")]
    Refused {
        /// The registry.
        url: String,
        /// HTTP status.
        status: u16,
        /// Its reason.
        error: String,
        /// Whom it blames.
        blame: Blame,
    },
    /// No usable answer.
    #[error("registry {url} does not answer ({cause}); is `kvferry serve --role registry` running there?")]
    Unreachable {
        /// The registry.
        url: String,
        /// What went wrong.
        cause: String,
    },
}

impl ClientError {
    /// Who can do something about it.
    #[must_use]
    pub fn blame(&self) -> Blame {
        match self {
            Self::Address(_) => Blame::Caller,
            Self::Refused { blame, .. } => *blame,
            Self::Unreachable { .. } => Blame::Environment,
        }
    }

    fn is_final(&self) -> bool {
        // Asking again with the same words helps against neither; 404 is no registry at all.
        matches!(self, Self::Refused { status, .. } if (400..500).contains(status) && ![408, 429].contains(status))
    }
}

/// Speaks to one registry.
#[derive(Clone, Debug)]
pub struct Client {
    http: reqwest::Client,
    url: String,
}

impl Client {
    /// A client of the registry at `url`, such as `http://127.0.0.1:7000`. Nothing is sent yet.
    ///
    /// # Errors
    /// [`ClientError::Address`] when the URL is not a loopback URL.
    pub fn new(url: &str) -> Result<Self, ClientError> {
        loopback_url(url).map_err(ClientError::Address)?;
        let http = loopback_http()
            .and_then(|builder| builder.timeout(TIMEOUT).build().map_err(|e| e.to_string()))
            .map_err(ClientError::Address)?;
        Ok(Self { http, url: url.trim_end_matches('/').to_owned() })
    }

    /// The registry's URL.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Registers or renews `member` once.
    ///
    /// # Errors
    /// As the registry refuses, or [`ClientError::Unreachable`].
    pub async fn register(&self, member: &Member) -> Result<Granted, ClientError> {
        self.json(Method::PUT, &["members", &member.instance.0], Some(member)).await
    }

    /// Renews the lease of `member` once.
    ///
    /// # Errors
    /// As the registry refuses (404: register again), or [`ClientError::Unreachable`].
    pub async fn heartbeat(&self, member: &Member) -> Result<Granted, ClientError> {
        let beat = Heartbeat { incarnation: member.incarnation };
        self.json(Method::POST, &["members", &member.instance.0, "heartbeat"], Some(&beat)).await
    }

    /// Ends the membership of `member`.
    ///
    /// # Errors
    /// [`ClientError::Unreachable`].
    pub async fn deregister(&self, member: &Member) -> Result<(), ClientError> {
        let beat = Heartbeat { incarnation: member.incarnation };
        self.send(Method::DELETE, &["members", &member.instance.0], Some(&beat)).await.map(drop)
    }

    /// Everybody who is there.
    ///
    /// # Errors
    /// [`ClientError::Unreachable`].
    pub async fn members(&self) -> Result<Vec<Member>, ClientError> {
        Ok(self.json::<Members>(Method::GET, &["members"], None::<&()>).await?.members)
    }

    /// Every instance of which somebody is there, whole or not.
    ///
    /// # Errors
    /// [`ClientError::Unreachable`].
    pub async fn groups(&self) -> Result<Vec<Group>, ClientError> {
        Ok(self.json::<Groups>(Method::GET, &["instances"], None::<&()>).await?.instances)
    }

    /// The instance of that name with all of its ranks.
    ///
    /// # Errors
    /// As the registry refuses (404: nobody of it is there; 503: not every rank is, "3 of 4"), or
    /// [`ClientError::Unreachable`].
    pub async fn lookup(&self, instance: &InstanceId) -> Result<Group, ClientError> {
        self.json(Method::GET, &["instances", &instance.0], None::<&()>).await
    }

    /// As [`Client::lookup`], for those who wait: `None` while the instance is not there or not whole.
    ///
    /// # Errors
    /// [`ClientError::Unreachable`].
    pub async fn find(&self, instance: &InstanceId) -> Result<Option<Group>, ClientError> {
        match self.lookup(instance).await {
            Ok(group) => Ok(Some(group)),
            Err(ClientError::Refused { status: 404 | 503, .. }) => Ok(None),
            Err(other) => Err(other),
        }
    }

    /// Keeps `member` registered from now on, retrying until the registry is there. Must be called within a tokio
    /// runtime.
    #[must_use]
    pub fn keep(&self, member: Member) -> Registration {
        let (told, state) = watch::channel(State::Trying);
        let (client, kept) = (self.clone(), member.clone());
        let task = tokio::spawn(async move { client.keep_alive(&kept, &told).await });
        Registration { client: self.clone(), member, state, task }
    }

    async fn keep_alive(&self, member: &Member, told: &watch::Sender<State>) {
        let mut wait = Duration::from_millis(20);
        loop {
            match self.register(member).await {
                Ok(_) => {
                    tracing::info!(instance = %member.instance, registry = %self.url, "registered");
                    told.send_replace(State::Registered);
                    wait = Duration::from_millis(20);
                    let lost = self.renew(member).await;
                    tracing::warn!(instance = %member.instance, cause = %lost, "registration lost");
                    told.send_replace(State::Trying);
                }
                Err(refused) if refused.is_final() => {
                    tracing::error!(instance = %member.instance, cause = %refused, "registration refused");
                    told.send_replace(State::Refused(refused.to_string()));
                    return;
                }
                Err(cause) => tracing::debug!(instance = %member.instance, %cause, "not registered yet"),
            }
            sleep(wait).await;
            wait = (wait * 2).min(HEARTBEAT);
        }
    }

    /// Renews until a heartbeat fails.
    async fn renew(&self, member: &Member) -> ClientError {
        loop {
            sleep(HEARTBEAT).await;
            if let Err(cause) = self.heartbeat(member).await {
                return cause;
            }
        }
    }

    async fn json<T: DeserializeOwned>(
        &self,
        method: Method,
        below: &[&str],
        body: Option<&impl Serialize>,
    ) -> Result<T, ClientError> {
        self.send(method, below, body).await?.json().await.map_err(|e| self.unreachable(&e))
    }

    async fn send(
        &self,
        method: Method,
        below: &[&str],
        body: Option<&impl Serialize>,
    ) -> Result<reqwest::Response, ClientError> {
        let mut url =
            Url::parse(&self.url).map_err(|e| ClientError::Address(format!("{}: {e}", self.url)))?;
        if let Ok(mut segments) = url.path_segments_mut() {
            segments.pop_if_empty().push("v1").extend(below);
        }
        let mut request = self.http.request(method, url);
        if let Some(body) = body {
            request = request.json(body);
        }
        let answer = request.send().await.map_err(|e| self.unreachable(&e))?;
        let status = answer.status();
        if status.is_success() {
            return Ok(answer);
        }
        let problem = answer.json::<Problem>().await.unwrap_or_else(|_| Problem {
            error: format!("answered {status}"),
            blame: if status == StatusCode::NOT_FOUND { Blame::Caller } else { Blame::PeerMisbehaved },
        });
        Err(ClientError::Refused {
            url: self.url.clone(),
            status: status.as_u16(),
            error: problem.error,
            blame: problem.blame,
        })
    }

    fn unreachable(&self, error: &reqwest::Error) -> ClientError {
        let mut cause: &dyn std::error::Error = error;
        while let Some(deeper) = cause.source() {
            cause = deeper;
        }
        ClientError::Unreachable { url: self.url.clone(), cause: cause.to_string() }
    }
}

/// How a kept registration stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// The registry refused for good, with its reason: a newer start has the name, or the record makes no sense.
    Refused(String),
    /// Registered, lease running.
    Registered,
    /// The registry is not reached yet, or again.
    Trying,
}

/// A member that is kept registered by a task; dropping it stops the task, and the lease runs out.
#[derive(Debug)]
pub struct Registration {
    client: Client,
    member: Member,
    state: watch::Receiver<State>,
    task: JoinHandle<()>,
}

impl Registration {
    /// How it stands.
    #[must_use]
    pub fn state(&self) -> State {
        self.state.borrow().clone()
    }

    /// What was registered.
    #[must_use]
    pub fn member(&self) -> &Member {
        &self.member
    }

    /// Waits until it is registered, or refused; has no time limit of its own.
    ///
    /// # Errors
    /// The registry's reason when it refused.
    pub async fn registered(&self) -> Result<(), String> {
        let mut state = self.state.clone();
        let settled = state.wait_for(|s| *s != State::Trying).await.map(|s| s.clone());
        match settled {
            Ok(State::Refused(reason)) => Err(reason),
            Ok(_) => Ok(()),
            Err(_) => Err("the registration task ended".into()),
        }
    }

    /// Stops renewing, for good, and tells the registry.
    ///
    /// # Errors
    /// When the registry does not answer; the lease then runs out by itself.
    pub async fn leave(&self) -> Result<(), ClientError> {
        self.task.abort();
        self.client.deregister(&self.member).await
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.task.abort();
    }
}
