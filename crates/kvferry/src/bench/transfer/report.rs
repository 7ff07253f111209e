//! What was measured, for people, as JSON and as a picture.

use comfy_table::CellAlignment;
use serde::Serialize;

use super::super::{
    chart::{Bar, Chart, Group},
    machine::{Machine, Spent},
    numbers::{counted, ratio},
    only_works,
};
use crate::terminal;

/// One way of one case.
#[derive(Debug, Serialize)]
pub(super) struct Way {
    pub(super) transport: &'static str,
    /// What an engine of others gets a descriptor for; nothing for kvferry's own transports.
    pub(super) descriptor: Option<&'static str>,
    /// How many it gets.
    pub(super) descriptors: Option<u64>,
    /// True for an engine as a peer uses it.
    pub(super) naive: bool,
    pub(super) digests: bool,
    pub(super) gb_per_s: f64,
    pub(super) gb_per_s_lowest: f64,
    pub(super) gb_per_s_highest: f64,
    pub(super) cpu_s_per_gb: f64,
    pub(super) ceiling: &'static str,
    #[serde(skip)]
    pub(super) ceiling_short: &'static str,
    pub(super) ceiling_gb_per_s: f64,
    pub(super) ceiling_cpu_s_per_gb: f64,
    pub(super) ratio: f64,
    pub(super) ratio_lowest: f64,
    pub(super) ratio_highest: f64,
}

impl Way {
    fn name(&self) -> String {
        match self.descriptor {
            None => self.transport.into(),
            Some(each) => format!("{}, {each}", self.transport),
        }
    }
}

#[derive(Debug, Serialize)]
pub(super) struct Measured {
    pub(super) name: &'static str,
    pub(super) what: String,
    pub(super) bytes: u64,
    pub(super) tokens: u64,
    pub(super) chunk_tokens: u64,
    pub(super) memcpy_gb_per_s: f64,
    pub(super) ways: Vec<Way>,
}

#[derive(Debug, Serialize)]
pub(super) struct Document {
    pub(super) version: u32,
    pub(super) machine: Machine,
    pub(super) size: &'static str,
    pub(super) rounds: u32,
    pub(super) memory: &'static str,
    pub(super) streams: u32,
    pub(super) congestion: String,
    pub(super) cases: Vec<Measured>,
}

pub(super) fn show(document: &Document) {
    let Document { machine, rounds, congestion, .. } = document;
    terminal::paragraph(machine, 2);
    let interleaved = counted((*rounds).into(), "interleaved round");
    let what = format!("{interleaved}; tcp: one stream, {congestion}, both ends here");
    terminal::paragraph(what, 2);
    for case in &document.cases {
        let Measured { name, what, tokens, chunk_tokens, memcpy_gb_per_s, .. } = case;
        let (mb, copy) = (case.bytes as f64 / 1e6, format!("plain memcpy {memcpy_gb_per_s:.2} GB/s"));
        terminal::paragraph(format_args!("\n{name}: {what}"), 2);
        let [tokens, chunk] = [*tokens, *chunk_tokens].map(terminal::number);
        terminal::line(format_args!("{tokens} tokens in chunks of {chunk}, {mb:.0} MB; {copy}"));
        // Of so few clock ticks that they say nothing, none are told.
        let cpu = |per_gb: f64| match per_gb * case.bytes as f64 / 1e9 * f64::from(*rounds) {
            spent if spent < Spent::FEW => "-".to_owned(),
            _ => format!("{per_gb:.2}"),
        };
        let mut table = terminal::table();
        table.set_header(["", "dig-\nests", "descr-\niptors", "GB/s", "CPU\ns/GB", "of the ceiling"]);
        let gb_per_s = |rate: f64| format!("{rate:.2}");
        for ways in case.ways.chunk_by(|a, b| a.ceiling == b.ceiling) {
            // Above what is compared with it.
            if let Some(Way { ceiling_short, ceiling_gb_per_s, ceiling_cpu_s_per_gb, .. }) = ways.first() {
                let (rate, cpu) = (gb_per_s(*ceiling_gb_per_s), cpu(*ceiling_cpu_s_per_gb));
                table.add_row([*ceiling_short, "", "", &rate, &cpu, "1"]);
            }
            for way in ways {
                table.add_row([
                    format!("  {}{}", way.name(), if way.naive { " *" } else { "" }),
                    if way.digests { "on" } else { "off" }.to_owned(),
                    way.descriptors.map_or("-".into(), |count| count.to_string()),
                    gb_per_s(way.gb_per_s),
                    cpu(way.cpu_s_per_gb),
                    ratio(way.ratio, way.ratio_lowest, way.ratio_highest),
                ]);
            }
        }
        for column in table.column_iter_mut().skip(1) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        terminal::line(table);
    }
    if document.cases.iter().flat_map(|case| &case.ways).any(|way| way.naive) {
        let naive = "* the engine as a peer uses it, never as kvferry does: a descriptor for each row, or for what each target \
                     page gets of packed rows, straight into a pool, with nothing checked. `block` is kvferry's: packed, through \
                     landing slots, scattered; `layer` the same bytes as one descriptor a layer, nothing packed or scattered.";
        terminal::paragraph(naive, 2);
    }
    if document.size == "small" {
        only_works("--size small");
    }
}

/// Rates side by side, each with its ceiling.
pub(super) fn draw(document: &Document) -> String {
    let bar = |way: &Way| Bar {
        label: way.name(),
        value: way.gb_per_s,
        low: way.gb_per_s_lowest,
        high: way.gb_per_s_highest,
        mark: Some(way.ceiling_gb_per_s),
        series: if way.naive { 2 } else { usize::from(way.digests) },
    };
    let group = |case: &Measured| Group {
        name: format!("{}: {}", case.name, case.what),
        bars: case.ways.iter().map(bar).collect(),
    };
    let series = ["without digests", "with digests", "as a peer uses it (naive)"];
    let naive = document.cases.iter().flat_map(|case| &case.ways).any(|way| way.naive);
    let note = format!("{}; {}, medians", document.machine, counted(document.rounds.into(), "round"));
    let chart = Chart {
        title: "kvferry bench transfer: GB/s of a hand-off",
        note: &note,
        one: None,
        series: if naive { &series } else { &series[..2] },
        mark: Some("its ceiling in this run"),
        groups: document.cases.iter().map(group).collect(),
    };
    chart.draw()
}
