//! Spans reach an OpenTelemetry collector, over OTLP/HTTP as the standard's variables say. Built only with the feature `otel`.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use std::{
    collections::BTreeSet,
    io::{BufRead, BufReader, Read, Write},
    net::TcpListener,
    sync::{Arc, Mutex},
};

use common::{Server, wait_until};
use kvferry::{
    plan::{Attempt, InstanceId, RoomId, RoomKey},
    server::{DecodeRecord, DecodeRequest, InstanceClient, PrefillRequest, SamplingSpec, TraceContext},
};

/// A span, as far as this test looks.
#[derive(Debug)]
struct Span {
    trace: Vec<u8>,
    id: Vec<u8>,
    parent: Vec<u8>,
    name: String,
}

/// The length-delimited fields of a Protocol Buffers message.
fn fields(mut message: &[u8]) -> Vec<(u64, &[u8])> {
    fn number(message: &mut &[u8]) -> u64 {
        let (mut value, mut shift) = (0, 0);
        loop {
            let byte = message[0];
            *message = &message[1..];
            value |= u64::from(byte & 0x7f) << shift;
            shift += 7;
            if byte < 0x80 {
                return value;
            }
        }
    }
    let mut found = Vec::new();
    while !message.is_empty() {
        let tag = number(&mut message);
        let len = match tag & 7 {
            0 => {
                number(&mut message);
                continue;
            }
            1 => 8,
            2 => number(&mut message) as usize,
            5 => 4,
            other => panic!("wire type {other}"),
        };
        let (field, rest) = message.split_at(len);
        if tag & 7 == 2 {
            found.push((tag >> 3, field));
        }
        message = rest;
    }
    found
}

fn all<'a>(messages: &[&'a [u8]], field: u64) -> Vec<&'a [u8]> {
    messages.iter().flat_map(|m| fields(m)).filter(|(f, _)| *f == field).map(|(_, bytes)| bytes).collect()
}

/// The spans of an `ExportTraceServiceRequest`.
fn spans(request: &[u8]) -> Vec<Span> {
    let scopes = all(&all(&[request], 1), 2);
    let one = |span: &[u8], field| all(&[span], field).first().map(|b| b.to_vec()).unwrap_or_default();
    all(&scopes, 2)
        .into_iter()
        .map(|span| Span {
            trace: one(span, 1),
            id: one(span, 2),
            parent: one(span, 4),
            name: String::from_utf8(one(span, 5)).unwrap(),
        })
        .collect()
}

/// Answers every request with 200 and keeps its body.
fn collector(listener: TcpListener) -> Arc<Mutex<Vec<Span>>> {
    let collected = Arc::new(Mutex::new(Vec::new()));
    let into = Arc::clone(&collected);
    std::thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            let into = Arc::clone(&into);
            std::thread::spawn(move || {
                let mut reader = BufReader::new(stream);
                loop {
                    let (mut length, mut line, mut first) = (0, String::new(), String::new());
                    while reader.read_line(&mut line).is_ok_and(|n| n > 2) {
                        if first.is_empty() {
                            first.clone_from(&line);
                        }
                        if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
                            length = value.trim().parse().unwrap();
                        }
                        line.clear();
                    }
                    if first.is_empty() {
                        return;
                    }
                    assert!(first.starts_with("POST /v1/traces "), "{first}");
                    let mut body = vec![0; length];
                    reader.read_exact(&mut body).unwrap();
                    into.lock().unwrap().extend(spans(&body));
                    reader.get_mut().write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").unwrap();
                }
            });
        }
    });
    collected
}

#[test]
fn prefill_and_decode_are_one_trace_at_the_collector() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let collected = collector(listener);
    let env = [("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint.as_str()), ("OTEL_BSP_SCHEDULE_DELAY", "100")];
    let registry = Server::start(&["--role", "registry"]);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let [prefill, decode] = ["prefill", "decode"].map(|role| {
        let args =
            ["--role", role, "--model", "embedded:llama_tiny", "--registry", &registry.url, "--chunk", "8"];
        let server = Server::start_with(&args, &env);
        let client = InstanceClient::new(&server.url).unwrap();
        wait_until("it is registered", || runtime.block_on(client.health()).unwrap().registered);
        server
    });
    let caller: TraceContext = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01".parse().unwrap();
    let key = RoomKey { room: RoomId(1), attempt: Attempt(0) };
    let (prompt, sampling) = ((5..45).collect::<Vec<u32>>(), SamplingSpec::default());
    let to_decode = DecodeRequest {
        key,
        prefill: InstanceId(prefill.instance.clone()),
        prompt: prompt.clone(),
        max_tokens: 4,
        sampling,
        top_logprobs: 0,
        ignore_eos: true,
        hold: false,
    };
    let to_prefill = PrefillRequest { key, prompt, sampling, top_logprobs: 0, ignore_eos: true };
    runtime.block_on(async {
        let client = |server: &Server| InstanceClient::new(&server.url).unwrap().traced(caller);
        let (to, from) = (client(&prefill), client(&decode));
        let decoded = async {
            let mut stream = from.decode(&to_decode).await.unwrap();
            while let Some(record) = stream.next().await.unwrap() {
                assert!(!matches!(record, DecodeRecord::Error(_)), "{record:?}");
            }
        };
        let (sent, ()) = tokio::join!(to.prefill(&to_prefill), decoded);
        sent.unwrap();
    });
    let names = |wanted: &str| collected.lock().unwrap().iter().filter(|span| span.name == wanted).count();
    wait_until("both sides have exported", || names("room") == 2 && names("compute") == 2);
    // What is not sent yet is sent before the process ends.
    assert_eq!((prefill.terminate(), decode.terminate()), (Some(0), Some(0)));
    let spans = collected.lock().unwrap();
    assert!(spans.iter().all(|span| span.trace == caller.trace.to_be_bytes()), "{spans:#?}");
    let ids: BTreeSet<_> = spans.iter().map(|span| span.id.clone()).collect();
    assert_eq!(ids.len(), spans.len());
    for span in &*spans {
        let outside = span.parent == caller.span.to_be_bytes();
        assert_eq!(outside, span.name == "room", "{span:?}");
        assert!(outside || ids.contains(&span.parent), "{span:?}");
    }
    for name in ["queue", "pair", "reserve", "transfer", "chunk", "verify", "first_token"] {
        assert!(spans.iter().any(|span| span.name == name), "{name}: {spans:#?}");
    }
}
