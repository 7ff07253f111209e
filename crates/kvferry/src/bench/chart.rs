//! Plots as SVG. Not a general plotter: horizontal bars and lines over a category axis, in the colours of the
//! plan's pictures.

use std::fmt::Write;

const COLOURS: [&str; 4] = ["#2a6f97", "#e07a5f", "#6a994e", "#e9b44c"];
const INK: &str = "#1f2933";
const DIM: &str = "#52606d";
const GRID: &str = "#cbd2d9";
const WIDTH: f64 = 760.0;
const LEFT: f64 = 190.0;
const RIGHT: f64 = 60.0;

/// One bar with its spread.
pub(super) struct Bar {
    pub(super) label: String,
    pub(super) value: f64,
    pub(super) low: f64,
    pub(super) high: f64,
    /// Its colour.
    pub(super) group: usize,
}

/// Bars whose full length is 1, or the highest value if that is more.
pub(super) fn bars(title: &str, note: &str, bars: &[Bar]) -> String {
    let height = 70.0 + 26.0 * bars.len() as f64 + 24.0;
    let most = bars.iter().map(|bar| bar.high).fold(1.0, f64::max);
    let x = |value: f64| LEFT + value / most * (WIDTH - LEFT - RIGHT);
    let mut svg = open(title, note, height);
    let bottom = 62.0 + 26.0 * bars.len() as f64;
    for tick in [0.0, 0.25, 0.5, 0.75, 1.0] {
        let at = x(tick);
        line(&mut svg, (at, 54.0), (at, bottom), GRID);
        text(&mut svg, (at, bottom + 16.0), "middle", DIM, &format!("{tick}"));
    }
    for (i, bar) in bars.iter().enumerate() {
        let top = 58.0 + 26.0 * i as f64;
        let (colour, middle) = (COLOURS[bar.group % COLOURS.len()], top + 9.0);
        text(&mut svg, (LEFT - 8.0, top + 13.0), "end", INK, &bar.label);
        let width = x(bar.value) - LEFT;
        let _ = writeln!(
            svg,
            r#"<rect x="{LEFT}" y="{top:.1}" width="{width:.1}" height="18" fill="{colour}"/>"#
        );
        line(&mut svg, (x(bar.low), middle), (x(bar.high), middle), INK);
        text(&mut svg, (x(bar.high) + 6.0, top + 13.0), "start", INK, &format!("{:.2}", bar.value));
    }
    svg + "</svg>\n"
}

fn open(title: &str, note: &str, height: f64) -> String {
    let mut svg = format!(
        r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" font-family="sans-serif" font-size="12">"#
    );
    let _ = write!(svg, "\n<rect width=\"{WIDTH}\" height=\"{height}\" fill=\"#ffffff\"/>\n");
    let _ = writeln!(
        svg,
        r#"<text x="14" y="22" font-size="15" font-weight="bold" fill="{INK}">{}</text>"#,
        escaped(title)
    );
    text(&mut svg, (14.0, 40.0), "start", DIM, note);
    svg
}

fn text(svg: &mut String, (x, y): (f64, f64), anchor: &str, colour: &str, text: &str) {
    let text = escaped(text);
    let _ =
        writeln!(svg, r#"<text x="{x:.1}" y="{y:.1}" text-anchor="{anchor}" fill="{colour}">{text}</text>"#);
}

fn line(svg: &mut String, (x1, y1): (f64, f64), (x2, y2): (f64, f64), colour: &str) {
    let _ = writeln!(svg, r#"<line x1="{x1:.1}" y1="{y1:.1}" x2="{x2:.1}" y2="{y2:.1}" stroke="{colour}"/>"#);
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
