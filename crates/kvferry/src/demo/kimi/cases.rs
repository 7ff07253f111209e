//! What is run: sections, each with instances of its own, and their cases.

use kvferry_engine::checkpoint::Embedded;
use kvferry_plan::Dtype;

use crate::{
    args::{ArithArg, DecodeBatchArg, InjectArg, name_of},
    demo::{
        prompts,
        suite::{
            Asked,
            needles::{self, LONG, SHORT},
        },
    },
};

/// Prompt tokens in a step where many steps are wanted: no multiple of a page, and no page is one of it.
const SMALL: u32 = 48;
/// Prompt tokens in a step where a step is long.
const LARGE: u32 = 8192;

/// Tokens of an answer: every rank is dealt at least one.
const BRIEF: u32 = 6;
/// Tokens of an answer that still goes on when further requests come to be continued.
const LASTING: u32 = 24;

/// Whom the prompts of a case are handed to, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum How {
    /// To the decode instance whose ranks are dealt the rows, one after the other.
    InTurn,
    /// To the same, all at the same time.
    AtOnce,
    /// To the same, each as soon as the one before it has a token and goes on.
    Joining,
    /// Each to two decode instances at the same time, and to some that cannot be served.
    Several,
}

/// One line of the report.
#[derive(Clone, Debug)]
pub(super) struct Case {
    pub(super) name: String,
    pub(super) how: How,
    pub(super) asked: Vec<Asked>,
}

/// Cases on the same instances.
#[derive(Clone, Debug)]
pub(super) struct Section {
    pub(super) model: Embedded,
    pub(super) kv: Dtype,
    pub(super) arith: ArithArg,
    pub(super) chunk: u32,
    /// Whether prefill, and the one process too, go on from what earlier prompts left. Decode never does.
    pub(super) prefixes: bool,
    /// Form of decode's steps.
    pub(super) form: DecodeBatchArg,
    /// Tokens of each answer.
    pub(super) answer: u32,
    /// Committed on purpose: then every case has to differ.
    pub(super) fault: Option<InjectArg>,
    pub(super) cases: Vec<Case>,
}

impl Section {
    /// Tokens of the longest prompt.
    pub(super) fn longest(&self) -> usize {
        self.cases.iter().flat_map(Case::lengths).max().unwrap_or(0)
    }

    /// Whether an instance is needed beside the one whose ranks are dealt the rows.
    pub(super) fn several(&self) -> bool {
        self.cases.iter().any(|case| case.how == How::Several)
    }
}

impl Case {
    fn new(name: &str, how: How, model: Embedded, lengths: &[usize]) -> Self {
        let asked = lengths.iter().map(|length| Asked::new(prompts::noise(vocabulary(model), *length, 0)));
        Self { name: name.to_owned(), how, asked: asked.collect() }
    }

    /// Tokens of each prompt.
    pub(super) fn lengths(&self) -> impl Iterator<Item = usize> {
        self.asked.iter().map(|asked| asked.prompt.ids.len())
    }
}

/// All sections, or those that `quick` runs.
pub(super) fn all(quick: bool) -> Vec<Section> {
    let narrow = [Dtype::Bf16, Dtype::Fp8E4m3].map(|kv| (ArithArg::Canonical, kv));
    let kinds = || narrow.into_iter().chain([(ArithArg::Fast, Dtype::F32)]);
    let models = [Embedded::KimiLinearTiny, Embedded::NeedleKimi];
    let mut sections = Vec::new();
    for model in models {
        for (arith, kv) in kinds() {
            let section = |chunk, form, answer, cases| Section {
                model,
                kv,
                arith,
                chunk,
                form,
                answer,
                prefixes: false,
                fault: None,
                cases,
            };
            let (fixed, eager) = (DecodeBatchArg::Fixed, DecodeBatchArg::Eager);
            sections.push(section(SMALL, fixed, LASTING, [edges(model), mixed(model)].concat()));
            sections.push(section(SMALL, eager, LASTING, mixed(model)));
            if !quick {
                let edge = LARGE as usize;
                let lengths = [edge - 1, edge, edge + 1];
                let cases = vec![Case::new("around a chunk", How::InTurn, model, &lengths)];
                sections.push(section(LARGE, fixed, BRIEF, cases));
            }
        }
    }
    let scale = if quick { SHORT } else { LONG };
    sections.extend(narrow.map(|(arith, kv)| {
        Section {
            model: Embedded::NeedleKimi,
            kv,
            arith,
            chunk: scale.chunk,
            form: DecodeBatchArg::Fixed,
            answer: BRIEF,
            prefixes: true,
            fault: None,
            cases: needles::all(scale)
                .into_iter()
                .map(|(name, asked)| Case { name, how: How::InTurn, asked: vec![asked] })
                .collect(),
        }
    }));
    sections.extend(controls());
    sections
}

/// Pages have 64 rows, virtual pages 256; the last case is served to two decodes and refused for all others.
fn edges(model: Embedded) -> Vec<Case> {
    let case = |name, how, lengths: &[usize]| Case::new(name, how, model, lengths);
    vec![
        case("one token", How::InTurn, &[1]),
        case("ranks without rows", How::InTurn, &[2, 3]),
        case("around a page", How::InTurn, &[63, 64, 65]),
        case("around a virtual page", How::InTurn, &[255, 256, 257]),
        case("many sends", How::InTurn, &[700]),
        case("served beside misfits", How::Several, &[130]),
    ]
}

/// Steps that generate for several requests, which come and end at different times.
fn mixed(model: Embedded) -> Vec<Case> {
    vec![
        Case::new("all of these at once", How::AtOnce, model, &[1, 3, 64, 65, 257, 500]),
        Case::new("joining running ones", How::Joining, model, &[2, 130, 1, 66, 255]),
    ]
}

/// What has to be found, each with what finds it.
fn controls() -> Vec<Section> {
    use ArithArg::{Canonical, Fast};
    let model = Embedded::KimiLinearTiny;
    [
        (InjectArg::BlindMerge, Canonical, Dtype::Bf16),
        (InjectArg::BlindMerge, Fast, Dtype::F32),
        (InjectArg::DropRope, Canonical, Dtype::Bf16),
        (InjectArg::SwapRank, Canonical, Dtype::Fp8E4m3),
        (InjectArg::MisrouteRow, Canonical, Dtype::Fp8E4m3),
        (InjectArg::MisrouteRow, Fast, Dtype::F32),
        (InjectArg::SwapState, Canonical, Dtype::Bf16),
        (InjectArg::SwapState, Fast, Dtype::F32),
    ]
    .map(|(fault, arith, kv)| Section {
        model,
        kv,
        arith,
        chunk: SMALL,
        prefixes: false,
        form: DecodeBatchArg::Fixed,
        answer: BRIEF,
        fault: Some(fault),
        cases: vec![Case::new(&name_of(&fault), How::InTurn, model, &[130])],
    })
    .into()
}

fn vocabulary(model: Embedded) -> u32 {
    if model == Embedded::NeedleKimi { 256 } else { 512 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_are_inside_the_vocabulary() {
        for model in [Embedded::KimiLinearTiny, Embedded::NeedleKimi] {
            assert_eq!(model.open().unwrap().config().vocab, vocabulary(model) as usize);
        }
    }

    #[test]
    fn both_forms_have_every_kind_of_case_and_every_control() {
        for quick in [false, true] {
            let sections = all(quick);
            let faults = sections.iter().filter(|section| section.fault.is_some()).count();
            assert_eq!(faults, 8);
            for how in [How::InTurn, How::AtOnce, How::Joining, How::Several] {
                assert!(sections.iter().flat_map(|s| &s.cases).any(|case| case.how == how));
            }
            for form in [DecodeBatchArg::Fixed, DecodeBatchArg::Eager] {
                let of_form = sections.iter().filter(|section| section.form == form);
                let mixed = |how| of_form.clone().filter(|s| s.cases.iter().any(|c| c.how == how)).count();
                assert_eq!((mixed(How::AtOnce), mixed(How::Joining)), (6, 6));
            }
            let longest = sections.iter().map(Section::longest).max();
            assert_eq!(longest < Some(1000), quick, "{longest:?}");
        }
    }
}
