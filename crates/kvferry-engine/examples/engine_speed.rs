//! Prints tokens per CPU-second:
//! `cargo run --release -p kvferry-engine --example engine_speed -- MODEL [fast|canonical] [gqa|mla] [LAYOUT] [PROMPT]
//! [GENERATED]`. CPU time is that of the whole process over the phase, so it depends little on how busy the machine
//! is.

#![allow(clippy::print_stdout)]

use std::{error::Error, path::PathBuf, sync::Arc, time::Instant};

use kvferry_engine::{
    Attention, Engine, EngineConfig, Event, LoadOptions, Model, NoHandOff, Request, math::Arith,
};

/// User and system time of this process in seconds, from `/proc/self/stat` (100 ticks a second on Linux).
fn cpu_seconds() -> Result<f64, Box<dyn Error>> {
    let stat = std::fs::read_to_string("/proc/self/stat")?;
    // Fields after the name, which is in parentheses; user and system time are the 14th and 15th of all.
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    let ticks = |i: usize| fields.get(i).map_or(Ok(0.0), |field| field.parse::<f64>());
    Ok((ticks(11)? + ticks(12)?) / 100.0)
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let path = PathBuf::from(args.next().ok_or("name a GGUF file or a model folder")?);
    let arith = match args.next().as_deref() {
        Some("canonical") => Arith::Canonical,
        _ => Arith::Fast,
    };
    let attention = match args.next().as_deref() {
        Some("mla") => Attention::Mla,
        _ => Attention::Gqa,
    };
    let layout = args.next().unwrap_or_else(|| "tp=1".into()).parse()?;
    let prompt: u32 = args.next().unwrap_or_else(|| "512".into()).parse()?;
    let generated: u32 = args.next().unwrap_or_else(|| "32".into()).parse()?;

    let begin = Instant::now();
    let model = Model::load(&path, LoadOptions { attention, arith, ..LoadOptions::default() })?;
    println!("load            {:8.2} s wall, {:.2} s cpu", begin.elapsed().as_secs_f64(), cpu_seconds()?);
    let vocab = u32::try_from(model.config().vocab)?;
    let config =
        EngineConfig { layout, pool_tokens: u64::from(prompt + generated + 1), ..EngineConfig::default() };
    let engine = Engine::start(model, &config, Arc::new(NoHandOff))?;
    let tokens: Vec<u32> = (0..prompt).map(|i| (i * 7919 + 13) % vocab).collect();
    let request = Request { ignore_eos: true, ..Request::greedy(tokens, generated + 1) };

    let (cpu, wall) = (cpu_seconds()?, Instant::now());
    let mut events = engine.generate(request)?;
    let mut first = None;
    let mut count = 0;
    while let Some(event) = events.recv() {
        match event {
            Event::Token { .. } => {
                first = first.or(Some((cpu_seconds()?, wall.elapsed().as_secs_f64())));
                count += 1;
            }
            Event::Failed(error) => return Err(error.into()),
            _ => {}
        }
    }
    let (first_cpu, first_wall) = first.ok_or("no token came")?;
    let (last_cpu, last_wall) = (cpu_seconds()?, wall.elapsed().as_secs_f64());
    let rate = |n: u32, seconds: f64| f64::from(n) / seconds.max(0.01);
    println!(
        "prefill {prompt:4}    {:8.1} tok/cpu-s, {:.1} tok/s",
        rate(prompt, first_cpu - cpu),
        rate(prompt, first_wall)
    );
    println!(
        "decode  {:4}    {:8.1} tok/cpu-s, {:.1} tok/s",
        count - 1,
        rate(count - 1, last_cpu - first_cpu),
        rate(count - 1, last_wall - first_wall)
    );
    Ok(())
}
