//! The client of the internal API. For a room that runs over two instances, see [`crate::InstancePair`].

use std::collections::VecDeque;

use kvferry_plan::{Blame, RankId, RoomKey};
use kvferry_registry::loopback_http;
use reqwest::Response;
use serde::{Serialize, de::DeserializeOwned};

use crate::{
    CapacityReply, DecodeRecord, DecodeRequest, Health, KvDump, PrefillReply, PrefillRequest, Problem, Stage,
    TraceContext, api::Reach,
};

/// Longest line of a decode stream.
const LINE: usize = 1 << 20;

/// Speaks to one instance.
#[derive(Clone, Debug)]
pub struct InstanceClient {
    http: reqwest::Client,
    url: String,
    /// The trace that requests belong to.
    trace: Option<TraceContext>,
}

impl InstanceClient {
    /// A client of the instance at `url`. Nothing is sent yet.
    ///
    /// # Errors
    /// When the HTTP client cannot be built.
    pub fn new(url: &str) -> Result<Self, Problem> {
        let http = loopback_http()
            .and_then(|builder| builder.build().map_err(|e| e.to_string()))
            .map_err(|e| Problem::new(Blame::Environment, Stage::Lookup, e))?;
        Ok(Self { http, url: url.trim_end_matches('/').to_owned(), trace: None })
    }

    /// The same, for requests that are part of a trace.
    #[must_use]
    pub fn traced(&self, trace: TraceContext) -> Self {
        Self { trace: Some(trace), ..self.clone() }
    }

    /// How the instance is.
    ///
    /// # Errors
    /// As it answers, or when it does not.
    pub async fn health(&self) -> Result<Health, Problem> {
        self.json(self.http.get(format!("{}/health", self.url))).await
    }

    /// What the instance holds, as JSON.
    ///
    /// # Errors
    /// As [`Self::health`].
    pub async fn ledger(&self) -> Result<serde_json::Value, Problem> {
        self.json(self.http.get(format!("{}/debug/ledger", self.url))).await
    }

    /// What it can hold, and what that takes.
    ///
    /// # Errors
    /// As [`Self::health`].
    pub async fn capacity(&self) -> Result<CapacityReply, Problem> {
        self.json(self.http.get(format!("{}/capacity", self.url))).await
    }

    /// Has a prompt computed and handed over; answers when the room has ended. Dropping the future ends the room.
    ///
    /// # Errors
    /// As [`Self::health`].
    pub async fn prefill(&self, request: &PrefillRequest) -> Result<PrefillReply, Problem> {
        self.json(self.post("/internal/prefill", request)).await
    }

    /// Has a prompt's cache taken over and continued; answers when the pages for it are reserved, which the stream's first
    /// record says too. Only then prefill is asked. Dropping the future or the stream ends the room.
    ///
    /// # Errors
    /// As [`Self::health`]: whatever goes wrong before the pages are there.
    pub async fn decode(&self, request: &DecodeRequest) -> Result<DecodeStream, Problem> {
        let answer = self.send(self.post("/internal/decode", request)).await?;
        Ok(DecodeStream {
            url: self.url.clone(),
            answer: Some(answer),
            buffer: VecDeque::new(),
            peeked: None,
        })
    }

    /// The prompt's cache of a room on one rank.
    ///
    /// # Errors
    /// As [`Self::health`].
    pub async fn kv(&self, key: RoomKey, rank: RankId) -> Result<KvDump, Problem> {
        let url = format!("{}/debug/kv/{}?attempt={}&rank={rank}", self.url, key.room, key.attempt);
        let answer = self.send(self.http.get(url)).await?;
        let bytes = answer.bytes().await.map_err(|e| self.silent(&e))?;
        KvDump::decode(&bytes).map_err(|e| Problem::new(Blame::PeerMisbehaved, Stage::Request, e))
    }

    /// Releases a held room.
    ///
    /// # Errors
    /// As [`Self::health`].
    pub async fn release(&self, key: RoomKey) -> Result<(), Problem> {
        let url = format!("{}/debug/kv/{}?attempt={}", self.url, key.room, key.attempt);
        self.send(self.http.delete(url)).await.map(drop)
    }

    /// Says that a decode stream's tokens are enough: it ends with [`DecodeRecord::Done`], after those that are on their way.
    ///
    /// # Errors
    /// As [`Self::health`]; 404 when nothing is being generated in that room.
    pub async fn enough(&self, key: RoomKey) -> Result<(), Problem> {
        let url = format!("{}/internal/decode/{}?attempt={}", self.url, key.room, key.attempt);
        self.send(self.http.delete(url)).await.map(drop)
    }

    fn post(&self, path: &str, body: &impl Serialize) -> reqwest::RequestBuilder {
        let request = self.http.post(format!("{}{path}", self.url)).json(body);
        match self.trace {
            Some(trace) => request.header(TraceContext::HEADER, trace.to_string()),
            None => request,
        }
    }

    async fn json<T: DeserializeOwned>(&self, request: reqwest::RequestBuilder) -> Result<T, Problem> {
        self.send(request).await?.json().await.map_err(|e| self.silent(&e))
    }

    async fn send(&self, request: reqwest::RequestBuilder) -> Result<Response, Problem> {
        let answer = request.send().await.map_err(|e| self.silent(&e))?;
        let status = answer.status();
        if status.is_success() {
            return Ok(answer);
        }
        let text = answer.text().await.unwrap_or_default();
        Err(match serde_json::from_str(&text) {
            Ok(problem) => Problem { status: Some(status), ..problem },
            Err(_) => {
                let cause = format!("{} answered {status} {text}", self.url);
                Problem::new(Blame::PeerMisbehaved, Stage::Request, cause)
            }
        })
    }

    fn silent(&self, error: &reqwest::Error) -> Problem {
        silent(&self.url, error)
    }
}

fn silent(url: &str, error: &reqwest::Error) -> Problem {
    let mut cause: &dyn std::error::Error = error;
    while let Some(deeper) = cause.source() {
        cause = deeper;
    }
    let problem =
        Problem::new(Blame::PeerMisbehaved, Stage::Lookup, format!("{url} does not answer: {cause}"));
    Problem { reach: if error.is_connect() { Reach::Refused } else { Reach::Silent }, ..problem }
}

/// The records of one decode request, as they come.
#[derive(Debug)]
pub struct DecodeStream {
    url: String,
    /// Gone once it was closed.
    answer: Option<Response>,
    buffer: VecDeque<u8>,
    peeked: Option<DecodeRecord>,
}

impl DecodeStream {
    /// The next record; `None` at the end of the stream. May be dropped and called again.
    ///
    /// # Errors
    /// When the stream breaks off or is not what an instance sends.
    pub async fn next(&mut self) -> Result<Option<DecodeRecord>, Problem> {
        match self.peeked.take() {
            Some(record) => Ok(Some(record)),
            None => self.read().await,
        }
    }

    /// The next record, which stays.
    pub(crate) async fn peek(&mut self) -> Result<Option<&DecodeRecord>, Problem> {
        if self.peeked.is_none() {
            self.peeked = self.read().await?;
        }
        Ok(self.peeked.as_ref())
    }

    /// Ends the connection, and with it the room.
    pub(crate) fn close(&mut self) {
        self.answer = None;
    }

    async fn read(&mut self) -> Result<Option<DecodeRecord>, Problem> {
        loop {
            if let Some(end) = self.buffer.iter().position(|b| *b == b'\n') {
                let line: Vec<u8> = self.buffer.drain(..=end).collect();
                return serde_json::from_slice(&line).map(Some).map_err(|e| self.garbled(&e.to_string()));
            }
            if self.buffer.len() > LINE {
                return Err(self.garbled("a line without end"));
            }
            let Some(answer) = &mut self.answer else { return Ok(None) };
            match answer.chunk().await.map_err(|e| silent(&self.url, &e))? {
                Some(bytes) => self.buffer.extend(bytes),
                None if self.buffer.is_empty() => return Ok(None),
                None => return Err(self.garbled("it ended in the middle of a line")),
            }
        }
    }

    fn garbled(&self, what: &str) -> Problem {
        let cause = format!("{} sent a stream that is not one of records: {what}", self.url);
        Problem::new(Blame::PeerMisbehaved, Stage::Request, cause)
    }
}
