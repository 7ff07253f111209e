//! What a demo found, for people.

use comfy_table::{Cell, CellAlignment, Table};
use kvferry_plan::Bytes;

use super::{
    conversion::Conversion,
    report::{CacheReport, Claim, Outcome, PromptReport, Report, Times},
};
use crate::{
    args::name_of,
    terminal::{self, Look, styled},
};

/// Characters of two layouts that stand beside each other.
const LAYOUTS: usize = 28;
/// Characters of a line of one that stands alone.
const LAYOUT: usize = 30;

/// Prints the table and the verdict.
pub(super) fn print(report: &Report) {
    terminal::line("");
    if report.prompts.iter().any(|p| p.outcome.transfer.is_some()) {
        let table = match report.prompts.as_slice() {
            [one] => single(report, one),
            many => several(report, many),
        };
        terminal::line(table);
        let how = format!("compared with {}; one run each, not a benchmark", report.reference);
        terminal::paragraph(styled(Look::Dim, how), 2);
    }
    verdict(report);
}

/// One prompt: a row for each fact.
fn single(report: &Report, prompt: &PromptReport) -> Table {
    let Outcome { transfer, two_processes, one_process, .. } = &prompt.outcome;
    let transfer = transfer.unwrap_or_default();
    let (two, one) = (two_processes.unwrap_or_default(), one_process.unwrap_or_default());
    let generated = prompt.outcome.generated.len();
    let mut table = terminal::table();
    table.set_header(["", "two processes", "one process"]);
    let mut row = |name: &str, two: String, one: String| {
        table.add_row([name.to_owned(), two, one]);
    };
    let two_lines = report.prefill.len() + report.decode.len() > LAYOUTS;
    let between = if two_lines { "\n→ " } else { " → " };
    let [prefill, decode] = [&report.prefill, &report.decode].map(|layout| lines(layout));
    row("layout", format!("{prefill}{between}{decode}"), "tp=1".into());
    let tokens = prompt.prompt_tokens.to_string();
    row("prompt tokens", tokens.clone(), tokens);
    row("time to first token", time(two.first_token), time(one.first_token));
    if let (Some(two), Some(one)) = (rate(two, generated), rate(one, generated)) {
        row("tokens per second after it", two, one);
    }
    let planned = if transfer.bytes == transfer.planned_bytes {
        "as planned".into()
    } else {
        format!("planned: {}", bytes(transfer.planned_bytes))
    };
    let mut moved = |name: &str, what: String| row(name, what, "-".into());
    moved("KV moved", format!("{}, {planned}", bytes(transfer.bytes)));
    moved("strided runs", format!("{} over {}", terminal::number(transfer.runs), report.transport));
    moved("first chunk to last byte", time(transfer.seconds));
    moved("wait after the prompt's end", time(transfer.exposed_seconds));
    table
}

/// A layout in lines that end with a comma, where it is long.
fn lines(layout: &str) -> String {
    let (mut lines, mut column) = (String::new(), 0);
    for item in layout.split_inclusive(',') {
        if column > 0 && column + item.len() > LAYOUT {
            lines.push_str("\n  ");
            column = 2;
        }
        lines.push_str(item);
        column += item.len();
    }
    lines
}

/// Several prompts: a row for each, as wide as their numbers are.
fn several(report: &Report, prompts: &[PromptReport]) -> Table {
    let mut table = terminal::table();
    let layouts = format!("{} → {}\nover {}", report.prefill, report.decode, report.transport);
    terminal::paragraph(styled(Look::Dim, layouts), 2);
    let right = |text: String| Cell::new(text).set_alignment(CellAlignment::Right);
    table.set_header(
        [
            "prompt\ntokens",
            "KV\nmoved",
            "runs",
            "transfer\ntime",
            "decode\nwaited",
            "TTFT\ntwo",
            "TTFT\none",
            "equal",
        ]
        .map(|head| right(head.into())),
    );
    for prompt in prompts {
        let outcome = &prompt.outcome;
        let equal = match (outcome.tokens_equal, outcome.bit_equal) {
            (true, true) => "bits",
            (true, false) => "tokens",
            (false, _) => "no",
        };
        let mut row = vec![prompt.prompt_tokens.to_string()];
        match (&outcome.transfer, outcome.two_processes, outcome.one_process) {
            (Some(transfer), Some(two), Some(one)) => row.extend([
                bytes(transfer.bytes),
                terminal::number(transfer.runs),
                time(transfer.seconds),
                time(transfer.exposed_seconds),
                time(two.first_token),
                time(one.first_token),
            ]),
            _ => row.extend((0..6).map(|_| "-".to_owned())),
        }
        row.push(equal.to_owned());
        table.add_row(row.into_iter().map(right));
    }
    table
}

/// The lines that say whether it is proven.
fn verdict(report: &Report) {
    let total = &report.total;
    let line = |name: &str, good: bool, detail: String| {
        let mark = if good { styled(Look::Good, "yes") } else { styled(Look::Bad, "no") };
        let detail = if detail.is_empty() { detail } else { format!(" ({detail})") };
        terminal::paragraph(format_args!("{name}: {mark}{}", styled(Look::Dim, detail)), 2);
    };
    if let Some(fault) = report.injected.filter(|_| !report.missed()) {
        terminal::line(format_args!("injected: {}, {}", name_of(&fault), fault.place()));
    }
    if total.transfer.is_none() {
        terminal::line("tokens, bits, log-probabilities: not compared");
    } else {
        line("tokens equal", total.tokens_equal, format!("{} generated", total.generated.len()));
        let what = match report.claim {
            Claim::Bits | Claim::CloseFromSamePrefill => {
                let state = |state: CacheReport| format!(", {} of state as it arrived", bytes(state.bytes));
                format!(
                    "{} of prompt KV on the decode ranks{}, {} log-probabilities",
                    bytes(total.cache.bytes),
                    total.state.map(state).unwrap_or_default(),
                    total.logprobs.len()
                )
            }
            Claim::Close => "not claimed in fast arithmetic, whose sums depend on the layout".into(),
        };
        line("bits equal", total.bit_equal, what);
        let limit = if report.claim == Claim::Bits { "" } else { " (limit 1e-4)" };
        terminal::line(format_args!("largest logprob difference: {}{limit}", difference(total)));
    }
    if let Some(conversion) = &total.conversion {
        converted(conversion);
    }
    if let Some(computed) = total.decode_prompt_tokens_computed {
        let prompt_tokens: u64 = report.prompts.iter().map(|p| p.prompt_tokens).sum();
        terminal::line(format_args!("prompt tokens computed by decode: {computed} of {prompt_tokens}"));
        let cached = [total.prefill_prompt_tokens_cached, total.decode_prompt_tokens_cached];
        if let [Some(prefill), Some(decode)] = cached
            && prefill + decode > 0
        {
            let cached = format!("{prefill} not computed by prefill, {decode} not moved");
            terminal::paragraph(format_args!("prompt tokens cached from earlier prompts: {cached}"), 2);
        }
    }
    for (number, prompt) in (1..).zip(&report.prompts) {
        let which = if report.prompts.len() > 1 { format!("prompt {number}: ") } else { String::new() };
        for finding in &prompt.outcome.findings {
            let blame = finding.blame.map(|b| format!(" (blame: {b})")).unwrap_or_default();
            let text = format!("{which}{}{blame}", finding.text);
            terminal::paragraph(format_args!("{}: {text}", styled(Look::Bad, "finding")), 2);
        }
    }
    if report.proven {
        let how = if report.claim == Claim::Bits { "proven equal" } else { "proven equal within 1e-4" };
        terminal::line(styled(Look::Good, how));
    } else if report.missed() {
        terminal::line(styled(Look::Bad, "nothing was tested: no fault was committed"));
    } else {
        let why = if report.injected.is_some() { " (as it should be: a fault was asked for)" } else { "" };
        terminal::line(format_args!("{}{why}", styled(Look::Bad, "NOT proven equal")));
    }
}

/// What prefill's conversion did to rows and to the answer.
fn converted(conversion: &Conversion) {
    let Conversion { from, to, .. } = conversion;
    terminal::paragraph(format_args!("converted by prefill, {from} to {to}: {}", conversion.loss()), 2);
    if let Some(equal) = conversion.source_type_tokens_equal {
        let equal = if equal { "yes" } else { "no" };
        let apart = apart(conversion.source_type_max_abs_logprob_diff);
        let text = format!(
            "beside one process in {from}: tokens equal: {equal}, largest logprob difference: {apart}"
        );
        terminal::paragraph(text, 2);
    }
}

fn difference(outcome: &Outcome) -> String {
    apart(outcome.max_abs_logprob_diff)
}

fn apart(difference: Option<f32>) -> String {
    match difference {
        None => "-".into(),
        Some(0.0) => "0".into(),
        Some(diff) if diff >= 1e-3 => format!("{diff:.3}"),
        Some(diff) => format!("{diff:.1e}"),
    }
}

/// A size with three digits.
pub(super) fn bytes(bytes: Bytes) -> String {
    let mut value = bytes.0 as f64;
    if value < 1000.0 {
        return format!("{} B", bytes.0);
    }
    let mut unit = "B";
    for next in ["kB", "MB", "GB", "TB"] {
        if value < 999.5 {
            break;
        }
        value /= 1000.0;
        unit = next;
    }
    format!("{} {unit}", digits(value))
}

/// A time with three digits.
fn time(seconds: f64) -> String {
    match seconds {
        s if s >= 0.9995 => format!("{} s", digits(s)),
        s if s >= 0.000_999_5 => format!("{} ms", digits(s * 1e3)),
        s => format!("{} µs", digits(s * 1e6)),
    }
}

fn digits(value: f64) -> String {
    match value {
        v if v >= 99.95 => format!("{v:.0}"),
        v if v >= 9.995 => format!("{v:.1}"),
        v => format!("{v:.2}"),
    }
}

/// Tokens per second after the first one. `None` when they are too few or came too fast: times are those at which
/// this process woke up, so that within some milliseconds they say nothing about the model.
fn rate(times: Times, generated: usize) -> Option<String> {
    let seconds = times.last_token - times.first_token;
    (generated >= 8 && seconds >= 0.2).then(|| digits((generated - 1) as f64 / seconds))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_layout_is_broken_at_commas() {
        assert_eq!(lines("tp=3,page=16"), "tp=3,page=16");
        assert_eq!(
            lines("tp=6,dcp=3,interleave=4,layers=0-2/3-3,page=16"),
            "tp=6,dcp=3,interleave=4,\n  layers=0-2/3-3,page=16"
        );
    }

    #[test]
    fn numbers_for_people() {
        assert_eq!(bytes(Bytes(999)), "999 B");
        assert_eq!(bytes(Bytes(46_080)), "46.1 kB");
        assert_eq!(bytes(Bytes(999_999)), "1.00 MB");
        assert_eq!(time(0.0), "0.00 µs");
        assert_eq!(time(0.003_14), "3.14 ms");
        assert_eq!(time(0.999_9), "1.00 s");
        assert_eq!(time(123.4), "123 s");
        let times = |first_token, last_token| Times { first_token, last_token };
        assert_eq!(rate(times(1.0, 2.0), 11).as_deref(), Some("10.0"));
        assert_eq!(rate(times(1.0, 2.0), 3), None);
        assert_eq!(rate(times(1.0, 1.05), 100), None);
        assert_eq!(terminal::number(1_234_567), "1,234,567");
        assert_eq!(terminal::number(12), "12");
    }
}
