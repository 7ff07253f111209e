//! The picture: prefill ranks on the left, decode ranks on the right, each with the tokens and heads that it holds.
//! A colour is a prefill rank: what it sends is drawn in its colour on both sides.

mod schematic;

use std::fmt::Write;

use kvferry_plan::{LayerId, Placement, RankId};

use super::answer::Answer;
use super::request::Request;
use crate::{failure::Failure, terminal::number};
use schematic::{Band, Schematic};

const COLOURS: [&str; 8] =
    ["#2a6f97", "#e07a5f", "#6a994e", "#e9b44c", "#6d597a", "#bc4b51", "#4d9de0", "#8d6a4f"];
const INK: &str = "#1f2933";
const DIM: &str = "#52606d";
/// What a decode rank holds already.
const HELD: &str = "#cbd2d9";
const EMPTY: &str = "#f0f2f4";
const WIDTH: f64 = 1060.0;
const MARGIN: f64 = 24.0;
const CELL: f64 = 13.0;
const GAP: f64 = 3.0;
/// Ranks of a side that are drawn.
const RANKS: u32 = 8;

/// A side's column.
struct Column<'a> {
    schematic: &'a Schematic,
    side: &'a Placement,
    decode: bool,
    x: f64,
    band: f64,
}

/// Where a rank's panel lies.
#[derive(Clone, Copy)]
struct Panel {
    rank: RankId,
    top: f64,
    height: f64,
}

/// The picture of an answer.
pub(super) fn draw(request: &Request, answer: &Answer) -> Result<String, Failure> {
    let schematic = Schematic::new(request, answer).map_err(Failure::caller)?;
    let bands = |side: &Placement| {
        let shown = side.ranks().min(RANKS);
        (0..shown).map(|r| schematic.rows(side, RankId(r)).len().max(1)).sum::<usize>()
    };
    let most = bands(schematic.src()).max(bands(schematic.dst()));
    let band = if most > 40 {
        6.0
    } else if most > 16 {
        9.0
    } else {
        15.0
    };
    let width = |side| panel_width(&schematic, side);
    let left = Column { schematic: &schematic, side: schematic.src(), decode: false, x: MARGIN, band };
    let right_x = WIDTH - MARGIN - width(schematic.dst());
    let right = Column { schematic: &schematic, side: schematic.dst(), decode: true, x: right_x, band };
    let (lefts, rights) = (left.panels(), right.panels());
    let bottom = |panels: &[Panel]| panels.last().map_or(0.0, |p| p.top + p.height);
    let tall = bottom(&lefts).max(bottom(&rights));
    let shift = |panels: Vec<Panel>| -> Vec<Panel> {
        let down = (tall - bottom(&panels)) / 2.0 + 84.0;
        panels.into_iter().map(|p| Panel { top: p.top + down, ..p }).collect()
    };
    let (lefts, rights) = (shift(lefts), shift(rights));
    let height = tall + 84.0 + 74.0;

    let mut svg = Svg::new(WIDTH, height);
    let total = answer.total();
    svg.text(MARGIN, 32.0, 16, INK, 600, &format!("{}  →  {}", request.prefill.label, request.decode.label));
    svg.text(
        MARGIN,
        54.0,
        13,
        DIM,
        400,
        &format!(
            "{} tokens of {}: {} in {} runs, {} strided copies ({} without strides)",
            number(request.tokens.len()),
            request.model,
            bytes(total.bytes),
            number(total.runs),
            number(total.copies),
            number(total.flat)
        ),
    );
    let from = MARGIN + width(schematic.src()) + 6.0;
    let to = right_x - 8.0;
    for m in &answer.moves {
        let find = |panels: &[Panel], rank| panels.iter().find(|p| p.rank == rank).copied();
        if let (Some(a), Some(b)) = (find(&lefts, m.src), find(&rights, m.dst)) {
            let share = m.cost.bytes as f64 / total.bytes.max(1) as f64;
            svg.arrow(
                (from, middle(a, &left)),
                (to, middle(b, &right)),
                colour(m.src),
                1.2 + 5.0 * share.sqrt(),
            );
        }
    }
    for panel in &lefts {
        let sent: u64 = answer.moves.iter().filter(|m| m.src == panel.rank).map(|m| m.cost.bytes).sum();
        left.draw(&mut svg, *panel, &format!("sends {}", bytes(sent)));
    }
    for panel in &rights {
        right.draw(&mut svg, *panel, &format!("receives {}", bytes(answer.received(panel.rank).0)));
    }
    legend(&mut svg, &schematic, height - 52.0);
    Ok(svg.finish(&format!("{} to {}", request.prefill.label, request.decode.label)))
}

fn legend(svg: &mut Svg, schematic: &Schematic, y: f64) {
    let hidden = |side: &Placement| side.ranks().saturating_sub(RANKS);
    let more = match (hidden(schematic.src()), hidden(schematic.dst())) {
        (0, 0) => String::new(),
        (a, b) => format!(" Not drawn: {a} prefill and {b} decode ranks."),
    };
    let lines = [
        "A colour is the prefill rank that sends; pale: held too, but another rank sends it; grey: decode has it \
         already; nearly white: held by another rank.",
        &format!(
            "Columns are tokens (here {} on pages of at most 4, planned like the real ones); rows are heads and \
             layers{}.{more}",
            schematic.tokens.end,
            if schematic.has_state() { "; squares set apart are heads of state" } else { "" }
        ),
    ];
    for (i, line) in lines.iter().enumerate() {
        svg.text(MARGIN, y + 18.0 * i as f64, 11, DIM, 400, line);
    }
}

fn middle(panel: Panel, column: &Column<'_>) -> f64 {
    let bands = column.schematic.rows(column.side, panel.rank).len().max(1) as f64;
    panel.top + 18.0 + bands * column.band / 2.0
}

fn panel_width(schematic: &Schematic, side: &Placement) -> f64 {
    let ranks = (0..side.ranks().min(RANKS)).map(RankId);
    let bands = ranks.flat_map(|rank| schematic.rows(side, rank));
    let ends = bands.map(|band| x_of(schematic, side, band, schematic.tokens.end.0 - 1) + CELL);
    ends.fold(60.0, f64::max)
}

/// Where a token lies in its panel; pages are set apart.
fn x_of(schematic: &Schematic, side: &Placement, band: Band, token: u64) -> f64 {
    token as f64 * CELL + (token / schematic.page_tokens(side, band).max(1)) as f64 * GAP
}

impl Column<'_> {
    /// One below the other, the first at 0.
    fn panels(&self) -> Vec<Panel> {
        let mut top = 0.0;
        let place = |rank| {
            let rows = self.schematic.rows(self.side, rank).len().max(1) as f64 * self.band;
            let state = self.schematic.state(self.side, rank).len() as f64 * (self.band + 4.0);
            let panel = Panel { rank, top, height: 18.0 + rows + state + 18.0 };
            top += panel.height;
            panel
        };
        (0..self.side.ranks().min(RANKS)).map(RankId).map(place).collect()
    }

    fn draw(&self, svg: &mut Svg, panel: Panel, what: &str) {
        let (rank, schematic) = (panel.rank, self.schematic);
        let name = if self.decode { "decode" } else { "prefill" };
        let stage = self.side.coords(rank).and_then(|at| self.side.stages.get(at.stage as usize));
        let layers = match stage.filter(|_| self.side.stages.len() > 1) {
            Some(stage) => format!(", {}", layer_span(stage)),
            None => String::new(),
        };
        svg.text(self.x, panel.top + 12.0, 12, INK, 600, &format!("{name} rank {rank}{layers}: {what}"));
        let mut y = panel.top + 18.0;
        for band in schematic.rows(self.side, rank) {
            for token in 0..schematic.tokens.end.0 {
                let x = self.x + x_of(schematic, self.side, band, token);
                let (fill, opacity) = self.look(rank, band, token);
                svg.rect(x, y, (CELL - 1.0, self.band - 1.5), fill, opacity);
            }
            y += self.band;
        }
        for band in schematic.state(self.side, rank) {
            for (i, head) in schematic.state_heads(band).into_iter().enumerate() {
                let x = self.x + i as f64 * (CELL + 6.0);
                let (fill, opacity) = self.look(rank, band, head);
                svg.rect(x, y + 4.0, (CELL + 3.0, self.band - 1.5), fill, opacity);
            }
            y += self.band + 4.0;
        }
    }

    fn look(&self, rank: RankId, band: Band, at: u64) -> (&'static str, f64) {
        let state = band.part.is_state();
        match self.schematic.holds(self.side, rank, band, at) {
            false => (EMPTY, 1.0),
            true if self.decode => match self.schematic.sender(rank, band, at) {
                Some(src) => (colour(src), 1.0),
                None => (HELD, 1.0),
            },
            true if !state && at < self.schematic.tokens.start.0 => (HELD, 1.0),
            true if self.schematic.sends(rank, band, at) => (colour(rank), 1.0),
            true => (colour(rank), 0.28),
        }
    }
}

fn colour(rank: RankId) -> &'static str {
    COLOURS[rank.index() % COLOURS.len()]
}

fn layer_span(stage: &[LayerId]) -> String {
    match stage {
        [first, .., last] if (last.0 - first.0) as usize + 1 == stage.len() => {
            format!("layers {first}–{last}")
        }
        [one] => format!("layer {one}"),
        _ => format!("{} layers", stage.len()),
    }
}

/// `2.3 GB`.
fn bytes(n: u64) -> String {
    let units = ["B", "kB", "MB", "GB", "TB"];
    let (mut value, mut unit) = (n as f64, 0);
    while value >= 1000.0 && unit + 1 < units.len() {
        value /= 1000.0;
        unit += 1;
    }
    let digits = usize::from(unit > 0 && value < 100.0);
    format!("{value:.digits$} {}", units.get(unit).unwrap_or(&""))
}

/// The document, element by element.
struct Svg {
    size: (f64, f64),
    body: String,
}

impl Svg {
    fn new(width: f64, height: f64) -> Self {
        Self { size: (width, height), body: String::new() }
    }

    fn rect(&mut self, x: f64, y: f64, (w, h): (f64, f64), fill: &str, opacity: f64) {
        let faint = if opacity < 1.0 { format!(" fill-opacity=\"{opacity}\"") } else { String::new() };
        let _ = writeln!(
            self.body,
            "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{w:.1}\" height=\"{h:.1}\" rx=\"2\" fill=\"{fill}\"{faint}/>"
        );
    }

    fn text(&mut self, x: f64, y: f64, size: u32, fill: &str, weight: u32, text: &str) {
        let text = text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
        let _ = writeln!(
            self.body,
            "<text x=\"{x:.1}\" y=\"{y:.1}\" font-size=\"{size}\" font-weight=\"{weight}\" fill=\"{fill}\">{text}</text>"
        );
    }

    fn arrow(&mut self, from: (f64, f64), to: (f64, f64), stroke: &str, width: f64) {
        let bend = (from.0 + to.0) / 2.0;
        let head = 4.0 + width;
        let _ = writeln!(
            self.body,
            "<path d=\"M{:.1} {:.1} C{bend:.1} {:.1} {bend:.1} {:.1} {:.1} {:.1}\" fill=\"none\" stroke=\"{stroke}\" \
             stroke-width=\"{width:.1}\" stroke-opacity=\"0.75\"/>\n<path d=\"M{:.1} {:.1} l-{head:.1} -{:.1} v{head:.1} z\" fill=\"{stroke}\"/>",
            from.0,
            from.1,
            from.1,
            to.1,
            to.0 - head,
            to.1,
            to.0,
            to.1,
            head / 2.0
        );
    }

    fn finish(self, title: &str) -> String {
        let (w, h) = self.size;
        let title = title.replace('&', "&amp;").replace('<', "&lt;");
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {w:.0} {h:.0}\" width=\"{w:.0}\" height=\"{h:.0}\" \
             font-family=\"system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif\" role=\"img\">\n\
             <title>{title}</title>\n<rect width=\"{w:.0}\" height=\"{h:.0}\" fill=\"#ffffff\"/>\n{}</svg>\n",
            self.body
        )
    }
}
