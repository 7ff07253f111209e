//! A router in front of instances, and its clients.

use std::time::{Duration, Instant};

use kvferry::registry::loopback_http;
use serde_json::{Value, json};

use crate::{
    common::{Server, wait_until},
    fleet::{Fleet, Peer},
};

/// Far more than any request here takes, on any machine.
const PATIENCE: Duration = Duration::from_secs(120);

pub(crate) struct Service {
    pub(crate) fleet: Fleet,
    pub(crate) prefills: Vec<Peer>,
    pub(crate) decodes: Vec<Peer>,
    pub(crate) router: Server,
    http: reqwest::Client,
}

impl Service {
    /// Instances `p0`, `p1`, `d0`, ... with these options each, and a router that sees them all.
    pub(crate) fn start(prefills: &[&[&str]], decodes: &[&[&str]]) -> Self {
        let fleet = Fleet::start();
        let router =
            ["--role", "router", "--model", "embedded:llama_tiny", "--registry", &fleet.registry.url];
        let router = Server::start(&router);
        let peers = |role: &str, all: &[&[&str]]| {
            let one = |(i, more): (usize, &&[&str])| fleet.peer(role, &format!("{}{i}", &role[..1]), more);
            all.iter().enumerate().map(one).collect::<Vec<_>>()
        };
        let (prefills, decodes) = (peers("prefill", prefills), peers("decode", decodes));
        let http = loopback_http().unwrap().timeout(PATIENCE).build().unwrap();
        let service = Self { fleet, prefills, decodes, router, http };
        let all = service.prefills.len() + service.decodes.len();
        wait_until("the router sees all", || service.ledger()["instances"].as_object().unwrap().len() == all);
        service
    }

    /// `GET` of a path at the router: the status and the body.
    pub(crate) fn get(&self, path: &str) -> (u16, Value) {
        self.fleet.runtime.block_on(async {
            let answer = self.http.get(format!("{}{path}", self.router.url)).send().await.unwrap();
            (answer.status().as_u16(), answer.json().await.unwrap())
        })
    }

    pub(crate) fn ledger(&self) -> Value {
        self.get("/debug/ledger").1
    }

    /// One completion, whole: the status and the body.
    pub(crate) fn complete(&self, body: &Value) -> (u16, Value) {
        self.fleet.runtime.block_on(complete(&self.http, &self.router.url, body))
    }

    /// Completions at the same time, in their order.
    pub(crate) fn complete_all(&self, bodies: &[Value]) -> Vec<(u16, Value)> {
        let start = |body: &Value| {
            let (http, url, body) = (self.http.clone(), self.router.url.clone(), body.clone());
            self.fleet.runtime.spawn(async move { complete(&http, &url, &body).await })
        };
        let all: Vec<_> = bodies.iter().map(start).collect();
        all.into_iter().map(|one| self.fleet.runtime.block_on(one).unwrap()).collect()
    }

    /// A streamed completion that has begun.
    pub(crate) fn stream(&self, body: &Value) -> Streamed<'_> {
        let mut body = body.clone();
        body["stream"] = true.into();
        let url = format!("{}/v1/completions", self.router.url);
        let ask = async { self.http.post(url).json(&body).send().await };
        let answer = self.fleet.runtime.block_on(ask).unwrap();
        assert_eq!(answer.status(), 200);
        Streamed { service: self, answer, text: String::new() }
    }

    /// The instances of a role at which the router has requests under way.
    pub(crate) fn busy(&self, role: &str) -> Vec<usize> {
        let ledger = self.ledger();
        let all = ledger["instances"].as_object().unwrap();
        let busy = |(name, entry): (&String, &Value)| {
            let here = entry["role"] == role && entry["load"]["requests"] != 0;
            here.then(|| name[1..].parse().unwrap())
        };
        all.iter().filter_map(busy).collect()
    }

    /// Waits until nothing is under way at the router or at these instances.
    pub(crate) fn quiet<'a>(&self, what: &str, peers: impl IntoIterator<Item = &'a Peer>) {
        wait_until(&format!("{what}: the router is quiet"), || {
            let ledger = self.ledger();
            let idle = |entry: &Value| entry["load"] == json!({ "requests": 0, "tokens": 0, "pages": 0 });
            ledger["rooms"] == 0
                && ledger["tasks"] == 0
                && ledger["instances"].as_object().unwrap().values().all(idle)
        });
        for peer in peers {
            crate::fleet::wait_for_quiet(what, peer);
        }
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = &Peer> {
        self.prefills.iter().chain(&self.decodes)
    }
}

pub(crate) async fn complete(http: &reqwest::Client, url: &str, body: &Value) -> (u16, Value) {
    let answer = http.post(format!("{url}/v1/completions")).json(body).send().await.unwrap();
    (answer.status().as_u16(), answer.json().await.unwrap())
}

/// A prompt of `tokens` tokens that is continued by `max_tokens`, greedily, with everything that tells answers apart.
pub(crate) fn request(tokens: u32, max_tokens: u32) -> Value {
    let prompt: Vec<u32> = (0..tokens).map(|i| (i * 37 + tokens) % 509 + 3).collect();
    json!({
        "model": "llama_tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0,
        "ignore_eos": true, "return_token_ids": true, "logprobs": 2,
    })
}

/// Server-sent events.
pub(crate) struct Streamed<'a> {
    service: &'a Service,
    answer: reqwest::Response,
    text: String,
}

impl Streamed<'_> {
    /// The next event's data; `None` at the end.
    pub(crate) fn next(&mut self) -> Option<String> {
        loop {
            if let Some((event, rest)) = self.text.split_once("\n\n") {
                let data = event.strip_prefix("data: ").unwrap().to_owned();
                self.text = rest.to_owned();
                return Some(data);
            }
            let chunk = self.service.fleet.runtime.block_on(async { self.answer.chunk().await }).unwrap()?;
            self.text += std::str::from_utf8(&chunk).unwrap();
        }
    }

    /// Reads to the end: the error that ended it and when that came, if there was one.
    pub(crate) fn end(mut self) -> Result<(), (Value, Instant)> {
        let mut done = false;
        while let Some(data) = self.next() {
            done = data == "[DONE]";
            let event: Value = serde_json::from_str(&data).unwrap_or_default();
            if let Some(error) = event.get("error") {
                let at = Instant::now();
                assert_eq!(self.next(), None, "nothing comes after an error");
                return Err((error.clone(), at));
            }
        }
        assert!(done, "a stream that broke off");
        Ok(())
    }
}
