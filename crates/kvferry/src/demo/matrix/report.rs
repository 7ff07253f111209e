//! What the matrix found, for people and for machines.

use kvferry_plan::Dtype;
use serde::Serialize;

use super::super::{
    report::{CacheReport, Finding},
    table::bytes,
};
use crate::{
    args::{DemoArgs, name_of},
    terminal::{self, Look, styled},
};

/// Findings that are shown; the rest is counted.
const SHOWN: usize = 10;

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

    fn equal(&self) -> usize {
        self.cells.iter().filter(|cell| cell.findings.is_empty()).count()
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
    /// Pairs of layouts, over all sheets.
    cells: usize,
    /// The exit status: true is 0.
    proven: bool,
    pub(super) sheets: Vec<Sheet>,
}

impl Matrix {
    pub(super) fn new(args: &DemoArgs, layouts: &[&'static str], prompts: &[usize]) -> Self {
        Self {
            suite: "matrix",
            transport: name_of(&args.engine.transport),
            prompt_tokens: prompts.into(),
            layouts: layouts.to_vec(),
            cells: 0,
            proven: false,
            sheets: Vec::new(),
        }
    }

    fn cells(&self) -> usize {
        self.sheets.iter().map(|sheet| sheet.cells.len()).sum()
    }

    /// Every pair was run and nothing was found.
    pub(super) fn proven(&self) -> bool {
        let pairs = self.layouts.len().pow(2);
        !self.sheets.is_empty()
            && self.sheets.iter().all(|sheet| sheet.cells.len() == pairs && sheet.equal() == pairs)
    }

    /// With the totals.
    pub(super) fn finished(&mut self) -> &Self {
        (self.cells, self.proven) = (self.cells(), self.proven());
        self
    }

    /// What is going to be run.
    pub(super) fn title(&self, sheets: usize) {
        let (count, prompts) = (self.layouts.len(), self.prompt_tokens.iter());
        let prompts: Vec<_> = prompts.map(ToString::to_string).collect();
        let title = format!(
            "{count} layouts to {count}, over {}, canonical arithmetic, {sheets} kinds of cache: {} cells; prompts of {} \
             tokens; `uneven` is a first stage of one layer",
            self.transport,
            sheets * count * count,
            prompts.join(" and ")
        );
        terminal::paragraph(title, 0);
    }

    /// Prints grid and verdict.
    pub(super) fn print(&self) {
        let wide = self.layouts.iter().map(|name| name.len()).max().unwrap_or(0);
        terminal::line("");
        let digits = |of: fn(usize) -> String| (1..=self.layouts.len()).map(of).collect::<String>();
        let tens = digits(|n| if n < 10 { " ".into() } else { (n / 10).to_string() });
        for (name, digits) in
            [("", tens), ("prefill, and decode by number", digits(|n| (n % 10).to_string()))]
        {
            terminal::line(styled(Look::Dim, format_args!("    {name:wide$}  {digits}")));
        }
        for (from, layout) in self.layouts.iter().enumerate() {
            let marks: String = (0..self.layouts.len()).map(|to| self.mark(from, to)).collect();
            terminal::line(format_args!("{:>2}  {layout:wide$}  {marks}", from + 1));
        }
        terminal::line("");
        for sheet in &self.sheets {
            let (equal, all) = (sheet.equal(), sheet.cells.len());
            let look = if equal == all { Look::Good } else { Look::Bad };
            let state = sheet.state.filter(|state| state.equal).map(|state| bytes(state.bytes));
            let state = state.map(|bytes| format!(", {bytes} of state equal")).unwrap_or_default();
            terminal::line(format_args!(
                "{} {} {:<4}  {}",
                sheet.model,
                sheet.attention,
                sheet.kv,
                styled(look, format_args!("{equal} of {all} equal{state}"))
            ));
        }
        self.print_findings();
        let cells = self.cells();
        if self.proven() {
            terminal::line(styled(Look::Good, format_args!("proven equal: all {cells} cells")));
        } else {
            let equal: usize = self.sheets.iter().map(Sheet::equal).sum();
            terminal::line(styled(
                Look::Bad,
                format_args!("NOT proven equal: {} of {cells} cells", cells - equal),
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
        let found = || {
            self.sheets.iter().flat_map(|sheet| {
                let cells = sheet.cells.iter();
                cells.flat_map(move |cell| cell.findings.iter().map(move |finding| (sheet, cell, finding)))
            })
        };
        for (sheet, cell, finding) in found().take(SHOWN) {
            let name = |number: usize| self.layouts.get(number).copied().unwrap_or_default();
            let (from, to) = (name(cell.prefill), name(cell.decode));
            let Sheet { model, attention, kv, .. } = sheet;
            let text = format!(
                "{}: {model} {attention} {kv}, {from} → {to}: {}",
                styled(Look::Bad, "finding"),
                finding.text
            );
            terminal::paragraph(text, 2);
        }
        match found().count() {
            more if more > SHOWN => terminal::line(format_args!("and {} more", more - SHOWN)),
            _ => {}
        }
    }
}
