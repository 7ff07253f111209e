//! Ratios and rates as SVG. Not a general plotter: groups of horizontal bars from 0, with what they are compared with at 1, or
//! each with a mark of its own. The picture follows the reader's light or dark mode.

use std::fmt::Write;

const WIDTH: f64 = 760.0;
const LEFT: f64 = 150.0;
const RIGHT: f64 = 70.0;
const MARGIN: f64 = 20.0;
/// Where the first group begins.
const TOP: f64 = 78.0;
/// Heights of a bar, of its row, and of a group's heading.
const BAR: f64 = 14.0;
const ROW: f64 = 22.0;
const HEAD: f64 = 30.0;

/// Colours by class, for light pages and for dark ones. The numbered ones are the series'.
const STYLE: &str = "\
text { font: 12px system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif; fill: #1f2933 }
.title { font-size: 15px; font-weight: 600 }
.head { font-weight: 600 }
.dim { fill: #52606d }
.page { fill: #ffffff }
.grid { stroke: #e4e7eb }
.one { stroke: #52606d; stroke-dasharray: 4 3 }
.spread { stroke: #1f2933; stroke-width: 1.2; fill: none }
.mark { fill: #1f2933 }
.s0 { fill: #2a6f97 }
.s1 { fill: #e07a5f }
.s2 { fill: #9aa5b1 }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 }
.dim { fill: #9aa4b2 }
.page { fill: #0d1117 }
.grid { stroke: #2d333b }
.one { stroke: #9aa4b2 }
.spread { stroke: #e6edf3 }
.mark { fill: #e6edf3 }
.s0 { fill: #4f9cc7 }
.s1 { fill: #e8927a }
.s2 { fill: #6b7682 }
}
";

/// A picture.
pub(super) struct Chart<'a> {
    pub(super) title: &'a str,
    /// Where it was measured.
    pub(super) note: &'a str,
    /// What lies at 1, if all are compared with that.
    pub(super) one: Option<&'a str>,
    /// Names of the series, of which there are at most three.
    pub(super) series: &'a [&'a str],
    /// What the marks are, if there are any.
    pub(super) mark: Option<&'a str>,
    pub(super) groups: Vec<Group>,
}

/// Bars that belong together.
pub(super) struct Group {
    pub(super) name: String,
    pub(super) bars: Vec<Bar>,
}

/// One bar with its spread.
pub(super) struct Bar {
    pub(super) label: String,
    pub(super) value: f64,
    pub(super) low: f64,
    pub(super) high: f64,
    /// What it is compared with.
    pub(super) mark: Option<f64>,
    /// Which of the series it is of.
    pub(super) series: usize,
}

impl Chart<'_> {
    pub(super) fn draw(&self) -> String {
        let bars = self.groups.iter().flat_map(|group| &group.bars);
        let most = bars.clone().map(|bar| bar.high.max(bar.mark.unwrap_or(0.0))).fold(1.0, f64::max);
        let step =
            [0.25, 0.5, 1.0, 2.0, 5.0, 10.0].into_iter().find(|step| most / step <= 6.0).unwrap_or(100.0);
        let x = |value: f64| LEFT + value / most * (WIDTH - LEFT - RIGHT);
        let bottom = TOP + HEAD * self.groups.len() as f64 + ROW * bars.count() as f64;
        let height = bottom + 34.0;

        let mut svg = format!(
            r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img" aria-label="{}">"#,
            escaped(self.title)
        );
        let _ = write!(svg, "\n<style>\n{STYLE}</style>\n");
        let _ = writeln!(svg, r#"<rect class="page" width="{WIDTH}" height="{height}" rx="8"/>"#);
        text(&mut svg, (MARGIN, 28.0), "start", "title", self.title);
        text(&mut svg, (MARGIN, 48.0), "start", "dim", self.note);
        let mut at = MARGIN;
        for (number, name) in self.series.iter().enumerate() {
            let _ = writeln!(svg, r#"<circle class="s{number}" cx="{:.1}" cy="66" r="5"/>"#, at + 5.0);
            text(&mut svg, (at + 16.0, 70.0), "start", "dim", name);
            at += 40.0 + 6.0 * name.chars().count() as f64;
        }
        if let Some(name) = self.mark {
            let _ = writeln!(svg, r#"<path class="mark" d="M{:.1} 59h3v14h-3z"/>"#, at + 4.0);
            text(&mut svg, (at + 16.0, 70.0), "start", "dim", name);
        }
        let ticks = (0..).map(|i| f64::from(i) * step).take_while(|tick| *tick <= most + 1e-9);
        let ticks: Vec<f64> = ticks.filter(|tick| self.one.is_none() || *tick != 1.0).collect();
        let mut top = TOP;
        for group in &self.groups {
            text(&mut svg, (MARGIN, top + 20.0), "start", "head", &group.name);
            top += HEAD;
            // Lines stay out of the headings.
            let reach = (top - 4.0, top + ROW * group.bars.len() as f64);
            for tick in &ticks {
                vertical(&mut svg, x(*tick), reach, "grid");
            }
            if self.one.is_some() {
                vertical(&mut svg, x(1.0), reach, "one");
            }
            for bar in &group.bars {
                bar.draw(&mut svg, top, x);
                top += ROW;
            }
        }
        for tick in &ticks {
            text(&mut svg, (x(*tick), bottom + 18.0), "middle", "dim", &format!("{tick}"));
        }
        if let Some(one) = self.one {
            text(&mut svg, (x(1.0), bottom + 18.0), "middle", "dim", &format!("1 ({one})"));
        }
        svg + "</svg>\n"
    }
}

impl Bar {
    fn draw(&self, svg: &mut String, top: f64, x: impl Fn(f64) -> f64) {
        let Self { label, value, low, high, mark, series } = self;
        let (middle, base) = (top + BAR / 2.0, top + 11.5);
        text(svg, (LEFT - 10.0, base), "end", "label", label);
        let (width, class) = (x(*value) - LEFT, series % 3);
        let _ = writeln!(
            svg,
            r#"<rect class="s{class}" x="{LEFT}" y="{top:.1}" width="{width:.1}" height="{BAR}" rx="2"/>"#
        );
        // A line between the lowest and the highest, with its ends marked.
        let (from, to, up, down) = (x(*low), x(*high), middle - 3.0, middle + 3.0);
        if low < high {
            let _ = writeln!(
                svg,
                r#"<path class="spread" d="M{from:.1} {up}V{down}M{from:.1} {middle}H{to:.1}M{to:.1} {up}V{down}"/>"#
            );
        }
        if let Some(mark) = mark {
            let _ = writeln!(svg, r#"<path class="mark" d="M{:.1} {top:.1}h3v{BAR}h-3z"/>"#, x(*mark) - 1.5);
        }
        // Nothing shines through the number.
        let at = x(high.max(*value).max(mark.unwrap_or(0.0))) + 8.0;
        let _ = writeln!(svg, r#"<path class="page" d="M{:.1} {top:.1}h32v{BAR}h-32z"/>"#, at - 3.0);
        text(svg, (at, base), "start", "value", &format!("{value:.2}"));
    }
}

fn text(svg: &mut String, (x, y): (f64, f64), anchor: &str, class: &str, text: &str) {
    let text = escaped(text);
    let _ =
        writeln!(svg, r#"<text class="{class}" x="{x:.1}" y="{y:.1}" text-anchor="{anchor}">{text}</text>"#);
}

fn vertical(svg: &mut String, x: f64, (from, to): (f64, f64), class: &str) {
    let _ = writeln!(svg, r#"<path class="{class}" d="M{x:.1} {from:.1}V{to:.1}"/>"#);
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
