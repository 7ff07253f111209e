//! What the matrix found, for people and for machines.

use kvferry_plan::{Cast, Dtype};
use serde::Serialize;

use super::super::{
    conversion::Conversion,
    report::{CacheReport, Finding},
    table::bytes,
};
use crate::{
    args::DemoArgs,
    terminal::{self, Look, styled},
};

/// Findings that are shown; the rest is counted.
const SHOWN: usize = 10;
/// Columns of the name of a kind of cache, or of a conversion.
const NAME: usize = 31;

/// One pair of layouts.
#[derive(Debug, Serialize)]
pub(super) struct Cell {
    /// Number of the prefill layout.
    pub(super) prefill: usize,
    /// Number of the decode layout.
    pub(super) decode: usize,
    pub(super) findings: Vec<Finding>,
}

/// All pairs with one model, form of attention and element type.
#[derive(Debug, Serialize)]
pub(super) struct Sheet {
    model: String,
    attention: &'static str,
    kv: String,
    /// State as it arrived, over all cells; `null` in a model without.
    state: Option<CacheReport>,
    pub(super) cells: Vec<Cell>,
}

impl Sheet {
    pub(super) fn new(model: &str, attention: &'static str, kv: Dtype) -> Self {
        Self { model: model.to_owned(), attention, kv: kv.to_string(), state: None, cells: Vec::new() }
    }

    pub(super) fn push(&mut self, cell: Cell, state: Option<CacheReport>) {
        self.cells.push(cell);
        self.state = CacheReport::sum([self.state, state]);
    }

    fn name(&self) -> String {
        format!("{} {} {}", self.model, self.attention, self.kv)
    }

    fn equal(&self) -> usize {
        self.cells.iter().filter(|cell| cell.findings.is_empty()).count()
    }
}

/// One pair of layouts with different element types.
#[derive(Debug, Serialize)]
pub(super) struct Converted {
    pub(super) model: String,
    pub(super) attention: &'static str,
    #[serde(skip)]
    pub(super) cast: Cast,
    pub(super) prefill: String,
    pub(super) decode: String,
    /// `null` when nothing came to be compared.
    pub(super) conversion: Option<Conversion>,
    pub(super) findings: Vec<Finding>,
}

impl Converted {
    fn equal(&self) -> bool {
        self.findings.is_empty() && self.conversion.is_some()
    }

    fn name(&self) -> String {
        format!("{} {} {}", self.model, self.attention, self.cast)
    }

    /// What a person is told.
    fn print(&self) {
        let text = match &self.conversion {
            Some(conversion) if self.equal() => format!("equal, {}", conversion.loss()),
            _ => "NOT equal".into(),
        };
        let look = if self.equal() { Look::Good } else { Look::Bad };
        terminal::line(format_args!("{:<NAME$}{}", self.name(), styled(look, text)));
    }
}

/// The whole suite.
#[derive(Debug, Serialize)]
pub(super) struct Matrix {
    suite: &'static str,
    transport: String,
    prompt_tokens: Vec<usize>,
    /// By number, on both sides.
    layouts: Vec<&'static str>,
    /// Those of prefill whose numbers come after them.
    prefill_only: Vec<&'static str>,
    /// Pairs of layouts, over all sheets.
    cells: usize,
    /// The exit status: true is 0.
    proven: bool,
    pub(super) sheets: Vec<Sheet>,
    #[serde(skip)]
    due: Due,
    pub(super) conversions: Vec<Converted>,
}

/// How many there are to be.
#[derive(Clone, Copy, Debug)]
pub(super) struct Due {
    /// Pairs of layouts, over all sheets.
    pub(super) cells: usize,
    /// Pairs with a conversion.
    pub(super) conversions: usize,
}

impl Matrix {
    pub(super) fn new(
        args: &DemoArgs,
        [layouts, prefill_only]: [&[&'static str]; 2],
        prompts: &[usize],
        due: Due,
    ) -> Self {
        Self {
            suite: "matrix",
            transport: args.engine.transport.to_string(),
            prompt_tokens: prompts.into(),
            layouts: layouts.to_vec(),
            prefill_only: prefill_only.to_vec(),
            cells: 0,
            proven: false,
            sheets: Vec::new(),
            due,
            conversions: Vec::new(),
        }
    }

    fn cells(&self) -> usize {
        self.sheets.iter().map(|sheet| sheet.cells.len()).sum()
    }

    /// Every pair was run and nothing was found.
    pub(super) fn proven(&self) -> bool {
        let equal: usize = self.sheets.iter().map(Sheet::equal).sum();
        !self.sheets.is_empty()
            && (self.cells(), equal) == (self.due.cells, self.due.cells)
            && self.conversions.len() == self.due.conversions
            && self.conversions.iter().all(Converted::equal)
    }

    /// With the totals.
    pub(super) fn finished(&mut self) -> &Self {
        (self.cells, self.proven) = (self.cells(), self.proven());
        self
    }

    /// What is going to be run.
    pub(super) fn title(&self, sheets: usize) {
        let (prefills, count) = (self.prefills().count(), self.layouts.len());
        let prompts: Vec<_> = self.prompt_tokens.iter().map(ToString::to_string).collect();
        let Due { cells, conversions } = self.due;
        let title = format!(
            "{prefills} layouts to {count}, over {}, canonical arithmetic, {sheets} kinds of cache: {cells} cells (with \
             GQA, pages are dealt over cp alone), and {conversions} pairs with a conversion; prompts of {} tokens; \
             `uneven` is a first stage of one layer",
            self.transport,
            prompts.join(" and ")
        );
        terminal::paragraph(title, 0);
    }

    /// Layouts of prefill, by number.
    fn prefills(&self) -> impl Iterator<Item = &'static str> {
        self.layouts.iter().chain(&self.prefill_only).copied()
    }

    /// Prints grid and verdict.
    pub(super) fn print(&self) {
        let wide = self.prefills().map(str::len).max().unwrap_or(0);
        terminal::line("");
        let digits = |of: fn(usize) -> String| (1..=self.layouts.len()).map(of).collect::<String>();
        let head =
            |name, digits| terminal::line(styled(Look::Dim, format_args!("    {name:wide$}  {digits}")));
        if self.layouts.len() >= 10 {
            head("", digits(|n| if n < 10 { " ".into() } else { (n / 10).to_string() }));
        }
        head("prefill, and decode by number", digits(|n| (n % 10).to_string()));
        for (from, layout) in self.prefills().enumerate() {
            let marks: String = (0..self.layouts.len()).map(|to| self.mark(from, to)).collect();
            terminal::line(format_args!("{:>2}  {layout:wide$}  {marks}", from + 1));
        }
        terminal::line(styled(Look::Dim, "    = bit-equal in every kind of cache, x not in all"));
        terminal::line("");
        for sheet in &self.sheets {
            let (equal, all) = (sheet.equal(), sheet.cells.len());
            let look = if equal == all { Look::Good } else { Look::Bad };
            let state = sheet.state.filter(|state| state.equal).map(|state| bytes(state.bytes));
            let state = state.map(|bytes| format!(", {bytes} of state equal")).unwrap_or_default();
            let equal = styled(look, format_args!("{equal} of {all} equal{state}"));
            terminal::line(format_args!("{:<NAME$}{equal}", sheet.name()));
        }
        terminal::line("");
        self.conversions.iter().for_each(Converted::print);
        self.print_findings();
        let cells = self.cells();
        if self.proven() {
            terminal::line(styled(
                Look::Good,
                format_args!(
                    "proven equal: all {cells} cells and {} pairs with a conversion",
                    self.conversions.len()
                ),
            ));
        } else {
            let equal: usize = self.sheets.iter().map(Sheet::equal).sum();
            terminal::line(styled(
                Look::Bad,
                format_args!(
                    "NOT proven equal: {} of {cells} cells, {} of {} pairs with a conversion",
                    cells - equal,
                    self.conversions.iter().filter(|pair| !pair.equal()).count(),
                    self.due.conversions
                ),
            ));
        }
    }

    /// `=` where every sheet is equal, `x` where one is not.
    fn mark(&self, from: usize, to: usize) -> char {
        let mut cells =
            self.sheets.iter().flat_map(|s| &s.cells).filter(|c| (c.prefill, c.decode) == (from, to));
        if cells.all(|cell| cell.findings.is_empty()) { '=' } else { 'x' }
    }

    fn print_findings(&self) {
        let cells = self.sheets.iter().flat_map(|sheet| {
            sheet.cells.iter().map(move |cell| {
                let layout = |number: usize| self.prefills().nth(number).unwrap_or_default();
                let pair = (layout(cell.prefill), layout(cell.decode));
                (sheet.name(), pair, &cell.findings)
            })
        });
        let converted = self
            .conversions
            .iter()
            .map(|pair| (pair.name(), (pair.prefill.as_str(), pair.decode.as_str()), &pair.findings));
        let found: Vec<_> = cells
            .chain(converted)
            .flat_map(|(name, pair, findings)| findings.iter().map(move |f| (name.clone(), pair, &f.text)))
            .collect();
        for (name, (from, to), text) in found.iter().take(SHOWN) {
            let finding = styled(Look::Bad, "finding");
            terminal::paragraph(format_args!("{finding}: {name}, {from} → {to}: {text}"), 2);
        }
        match found.len() {
            more if more > SHOWN => terminal::line(format_args!("and {} more", more - SHOWN)),
            _ => {}
        }
    }
}
