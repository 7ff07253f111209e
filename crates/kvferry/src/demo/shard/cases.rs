//! What is run: sections, each with instances of its own, and the cases of each pair of them.

use kvferry_engine::{checkpoint::Embedded, tokenizer::Tokenizer};
use kvferry_plan::Dtype;

use super::passkeys;
use crate::{
    args::{ArithArg, AttentionArg, InjectArg, name_of},
    demo::{
        prompts::{self, Prompt},
        suite::{Asked, needles},
    },
    failure::Failure,
};

/// Layouts of prefill over whose ranks pages are dealt, by TP of latent rows and by CP of keys and values.
const TP_SHARDED: [&str; 2] = ["tp=2,shard=on", "tp=4,shard=on"];
const CP_SHARDED: [&str; 2] = ["cp=2,shard=on", "cp=4,shard=on"];
/// The layouts of decode.
pub(super) const DECODES: [&str; 3] = ["tp=1", "tp=2", "tp=4,dcp=4"];

/// Tokens of a page, where the section does not say otherwise.
pub(super) const PAGE: u64 = 16;
/// Tokens of a page in which needles lie.
const LONG_PAGE: u64 = 64;
/// Prompt tokens in a step: no multiple of a page, and the end of a step lies in any rank's page.
const CHUNK: u32 = 40;
/// The same of whole rotations.
const WHOLE_CHUNK: u32 = 64;
/// The same for prompts that are read in few steps.
const LONG_CHUNK: u32 = 256;
/// Tokens of an answer: every rank of decode is dealt at least one.
const BRIEF: u32 = 4;
/// For a needle of five digits and the dot behind them, and for ` 1234.`.
const KNOWN: u32 = 6;

/// The model of a section.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Subject {
    Embedded(Embedded),
    SmolLm2,
}

impl Subject {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Embedded(embedded) => embedded.name(),
            Self::SmolLm2 => "smollm2",
        }
    }

    /// Ids that all are less than.
    fn vocabulary(self) -> u32 {
        match self {
            Self::Embedded(Embedded::NeedleKimi) => 256,
            Self::Embedded(_) => 512,
            Self::SmolLm2 => 49_152,
        }
    }
}

/// How the prompts of a case are handed over.
#[derive(Clone, Debug)]
pub(super) enum How {
    /// One after the other.
    InTurn,
    /// All at the same time.
    AtOnce,
    /// All at the same time, and with them one that has to be refused.
    WithOnePast(Past),
}

/// A prompt that is one token longer than what can be served.
#[derive(Clone, Debug)]
pub(super) struct Past {
    pub(super) prompt: Prompt,
    /// The longest that can.
    pub(super) limit: u64,
}

/// One line of the report, for one pair of instances.
#[derive(Clone, Debug)]
pub(super) struct Case {
    pub(super) name: String,
    pub(super) how: How,
    pub(super) asked: Vec<Asked>,
}

impl Case {
    /// Tokens of each prompt, those that have to be refused first.
    pub(super) fn lengths(&self) -> impl Iterator<Item = usize> {
        let past = match &self.how {
            How::WithOnePast(past) => Some(&past.prompt),
            How::InTurn | How::AtOnce => None,
        };
        past.into_iter().chain(self.asked.iter().map(|asked| &asked.prompt)).map(|prompt| prompt.ids.len())
    }
}

/// A prefill and a decode instance of a section by number, and what is handed from one to the other.
#[derive(Clone, Debug)]
pub(super) struct Pair {
    pub(super) prefill: usize,
    pub(super) decode: usize,
    pub(super) cases: Vec<Case>,
}

/// Cases on the same instances.
#[derive(Clone, Debug)]
pub(super) struct Section {
    /// What its cases are about.
    pub(super) title: &'static str,
    pub(super) model: Subject,
    pub(super) attention: AttentionArg,
    pub(super) kv: Dtype,
    pub(super) arith: ArithArg,
    pub(super) chunk: u32,
    pub(super) page: u64,
    /// Whether prefill, and the one process too, go on from what earlier prompts left. Decode never does.
    pub(super) prefixes: bool,
    /// Tokens of each prefill and each decode pool; what the cases need where nothing is said.
    pub(super) pools: [Option<u64>; 2],
    /// Tokens of each answer.
    pub(super) answer: u32,
    /// Committed on purpose: then every case has to differ.
    pub(super) fault: Option<InjectArg>,
    /// Handed over before all cases, whatever comes of it.
    pub(super) before: Option<Prompt>,
    pub(super) prefills: Vec<&'static str>,
    pub(super) decodes: Vec<&'static str>,
    /// Every prefill with every decode.
    pub(super) pairs: Vec<Pair>,
}

impl Section {
    fn new(
        title: &'static str,
        (model, attention): (Subject, AttentionArg),
        (arith, kv): (ArithArg, Dtype),
        prefills: &[&'static str],
        decodes: &[&'static str],
    ) -> Self {
        Self {
            title,
            model,
            attention,
            kv,
            arith,
            chunk: CHUNK,
            page: PAGE,
            prefixes: true,
            pools: [None; 2],
            answer: BRIEF,
            fault: None,
            before: None,
            prefills: prefills.into(),
            decodes: decodes.into(),
            pairs: Vec::new(),
        }
    }

    /// The same with what is handed over between each pair: prompts of its own, where there are several, so that prefill
    /// has nothing of them.
    fn with(mut self, cases: impl Fn(&mut Noise) -> Vec<Case>) -> Self {
        let mut noise = Noise { vocabulary: self.model.vocabulary(), seed: 0 };
        for prefill in 0..self.prefills.len() {
            for decode in 0..self.decodes.len() {
                self.pairs.push(Pair { prefill, decode, cases: cases(&mut noise) });
            }
        }
        self
    }

    /// All cases.
    pub(super) fn cases(&self) -> impl DoubleEndedIterator<Item = &Case> {
        self.pairs.iter().flat_map(|pair| &pair.cases)
    }

    /// Tokens of the longest prompt.
    pub(super) fn longest(&self) -> usize {
        self.cases().flat_map(Case::lengths).max().unwrap_or(0)
    }
}

/// Prompts that have nothing in common.
struct Noise {
    vocabulary: u32,
    seed: u64,
}

impl Noise {
    fn prompt(&mut self, tokens: usize) -> Prompt {
        self.seed += 1;
        prompts::noise(self.vocabulary, tokens, self.seed)
    }

    fn case(&mut self, name: &str, how: How, lengths: &[usize]) -> Case {
        let asked = lengths.iter().map(|tokens| Asked::new(self.prompt(*tokens))).collect();
        Case { name: name.to_owned(), how, asked }
    }

    /// A prompt of whole pages and a token, and one that goes on from these pages.
    fn going_on(&mut self, name: &str, tokens: usize) -> Case {
        let mut case = self.case(name, How::InTurn, &[tokens + 1, tokens + 21]);
        if let [first, second] = case.asked.as_mut_slice() {
            for (id, earlier) in second.prompt.ids.iter_mut().zip(&first.prompt.ids) {
                *id = *earlier;
            }
            second.cached = Some(tokens as u64);
        }
        case
    }
}

/// The tokenizer of SmolLM2, where it is asked too.
pub(super) fn all(smollm2: Option<&Tokenizer>) -> Result<Vec<Section>, Failure> {
    use Embedded::{DeepseekV3Tiny, KimiLinearTiny, LlamaTiny};
    let own = |embedded| (Subject::Embedded(embedded), AttentionArg::Gqa);
    let mut sections = Vec::new();
    for kind in [(ArithArg::Canonical, Dtype::Bf16), (ArithArg::Fast, Dtype::F32)] {
        let edge = |model, prefills: &[&'static str]| {
            Section::new("edges", model, kind, prefills, &DECODES).with(edges)
        };
        sections.push(edge(own(DeepseekV3Tiny), &TP_SHARDED));
        sections.push(edge(own(KimiLinearTiny), &TP_SHARDED));
        sections.push(edge(own(LlamaTiny), &["cp=2", "cp=2,shard=on", "cp=4,shard=on"]));
        sections.extend(pressure(kind));
        sections.extend(limits(kind));
        sections.push(needles(kind, smollm2.is_none()));
    }
    if let Some(tokenizer) = smollm2 {
        for kind in [(ArithArg::Canonical, Dtype::F32), (ArithArg::Fast, Dtype::F32)] {
            let [mla, gqa] = [AttentionArg::Mla, AttentionArg::Gqa].map(|form| (Subject::SmolLm2, form));
            let edge = |model, prefills: &[&'static str]| {
                Section::new("edges", model, kind, prefills, &DECODES).with(edges)
            };
            let keys = |model, prefills: &[&'static str], decode| -> Result<Section, Failure> {
                let known = passkeys::all(tokenizer)?;
                let case = |_: &mut Noise| {
                    vec![Case { name: "pass keys".into(), how: How::InTurn, asked: known.clone() }]
                };
                let section = Section::new("pass keys", model, kind, prefills, &[decode]);
                // All of each prompt is computed, as in one process.
                Ok(Section { chunk: LONG_CHUNK, prefixes: false, answer: KNOWN, ..section }.with(case))
            };
            sections.push(edge(mla, &TP_SHARDED));
            sections.push(edge(gqa, &CP_SHARDED));
            sections.push(keys(mla, &["tp=2,shard=on", "tp=2"], "tp=4,dcp=4")?);
            sections.push(keys(gqa, &["cp=2,shard=on", "cp=2"], "tp=1")?);
        }
    }
    sections.extend(controls());
    Ok(sections)
}

/// Pages have 16 tokens, rotations 32 or 64, steps 40.
fn edges(noise: &mut Noise) -> Vec<Case> {
    let page = PAGE as usize;
    vec![
        noise.case("one token", How::InTurn, &[1]),
        noise.case("around a page", How::InTurn, &[15, 16, 17]),
        noise.case("around a rotation", How::InTurn, &[31, 32, 33, 63, 64, 65]),
        noise.case("around a step", How::InTurn, &[39, 40, 41, 80, 81]),
        noise.going_on("goes on after 1 page", page),
        noise.going_on("goes on after 3 pages", 3 * page),
        noise.going_on("goes on after 5 pages", 5 * page),
        noise.case("all of these at once", How::AtOnce, &[1, 16, 17, 65, 130]),
    ]
}

/// Long texts with needles, which prefill reads once.
fn needles(kind: (ArithArg, Dtype), quick: bool) -> Section {
    let scale = if quick { needles::SHORT } else { needles::LONG };
    let model = (Subject::Embedded(Embedded::NeedleKimi), AttentionArg::Gqa);
    let section = Section::new("needles", model, kind, &TP_SHARDED, &DECODES);
    let cases = |_: &mut Noise| {
        let mut cases: Vec<Case> = needles::all(scale)
            .into_iter()
            .map(|(name, asked)| Case { name, how: How::InTurn, asked: vec![asked] })
            .collect();
        // The text itself: all of it where it comes first.
        if let Some(text) = cases.first_mut().and_then(|case| case.asked.first_mut()) {
            text.cached = None;
        }
        cases
    };
    Section { page: LONG_PAGE, chunk: scale.chunk, answer: KNOWN, ..section }.with(cases)
}

/// Pools that hold a third of what is asked for at the same time, with a cache of earlier prompts in them.
fn pressure(kind: (ArithArg, Dtype)) -> [Section; 2] {
    const POOL: u64 = 16 * PAGE;
    let cases = |noise: &mut Noise| {
        let lengths = [70, 130, 97, 40, 112, 81, 128, 66];
        let mut cases = ["more than the pool holds", "others after them"]
            .map(|name| noise.case(name, How::AtOnce, &lengths))
            .to_vec();
        let again: Vec<Asked> =
            cases.iter().flat_map(|case| &case.asked).step_by(3).map(ToOwned::to_owned).collect();
        cases.push(Case { name: "some of them again".into(), how: How::AtOnce, asked: again });
        for asked in cases.iter_mut().flat_map(|case| &mut case.asked) {
            asked.cached = None;
        }
        cases
    };
    let section = |model, prefill, decode| {
        let model = (Subject::Embedded(model), AttentionArg::Gqa);
        let section = Section::new("pressure", model, kind, &[prefill], &[decode]);
        Section { pools: [Some(POOL), None], ..section }.with(cases)
    };
    [
        section(Embedded::KimiLinearTiny, "tp=4,shard=on", "tp=4,dcp=4"),
        section(Embedded::LlamaTiny, "cp=2,shard=on", "tp=2"),
    ]
}

/// Prompts at and around what a pool lets in: by the normal path, and with `ignore_eos` and no cache of earlier prompts.
fn limits(kind: (ArithArg, Dtype)) -> Vec<Section> {
    const POOL: u64 = 16 * PAGE;
    let around = |limit: u64| {
        move |noise: &mut Noise| {
            let longest = limit as usize;
            let past = Past { prompt: noise.prompt(longest + 1), limit };
            vec![
                noise.case("at the limit", How::InTurn, &[longest - 1, longest]),
                noise.case("past it, others behind", How::WithOnePast(past), &[longest, 20, 33]),
                noise.case("after it", How::InTurn, &[30]),
            ]
        }
    };
    let mut sections = Vec::new();
    for (model, prefill, ranks) in [
        (Embedded::DeepseekV3Tiny, "tp=4,shard=on", 4),
        (Embedded::LlamaTiny, "cp=2,shard=on", 2),
        (Embedded::LlamaTiny, "tp=2", 1),
    ] {
        let model = (Subject::Embedded(model), AttentionArg::Gqa);
        // The scheduler keeps a page of each rank back, and further tokens.
        let kept = ranks * PAGE;
        let without_eos = POOL - kept - 3;
        let paths = [
            ("limits", true, POOL - kept - 2),
            ("limits of ignore-eos", false, without_eos - without_eos % PAGE),
        ];
        for (title, prefixes, limit) in paths {
            let section = Section::new(title, model, kind, &[prefill], &["tp=1"]);
            sections.push(Section { prefixes, pools: [Some(POOL), None], ..section }.with(around(limit)));
        }
    }
    // Decode has to hold a token of the answer as well, on pages that count four times.
    let model = (Subject::Embedded(Embedded::DeepseekV3Tiny), AttentionArg::Gqa);
    let section = Section::new("limits of decode", model, kind, &["tp=2,shard=on"], &["tp=4,dcp=4"]);
    sections.push(Section { pools: [None, Some(POOL)], answer: 1, ..section }.with(around(POOL - 1)));
    sections
}

/// What has to be found, each with what finds it.
fn controls() -> Vec<Section> {
    use ArithArg::{Canonical, Fast};
    let deepseek = (Subject::Embedded(Embedded::DeepseekV3Tiny), AttentionArg::Gqa);
    let llama = (Subject::Embedded(Embedded::LlamaTiny), AttentionArg::Gqa);
    [
        (InjectArg::WrongOwner, deepseek, "tp=4,shard=on", (Canonical, Dtype::Bf16)),
        (InjectArg::WrongOwner, llama, "cp=2,shard=on", (Fast, Dtype::F32)),
        (InjectArg::FilterByPosition, deepseek, "tp=2,shard=on", (Canonical, Dtype::Bf16)),
        (InjectArg::FilterByPosition, llama, "cp=4,shard=on", (Fast, Dtype::F32)),
        (InjectArg::DropEmptyFinal, deepseek, "tp=2,shard=on", (Canonical, Dtype::Bf16)),
    ]
    .map(|(fault, model, prefill, kind)| {
        let section = Section::new("faults", model, kind, &[prefill], &["tp=4,dcp=4"]);
        // Every rank has as many pages as any other, so that as many bytes come as have to; or some have none.
        let tokens = if fault == InjectArg::DropEmptyFinal { 10 } else { 128 };
        let cases = |noise: &mut Noise| vec![noise.case(&name_of(&fault), How::InTurn, &[tokens])];
        // The first rank keeps its page: the second one owns the first page of the next prompt, and the pages of this one
        // have other places in the pools of the ranks.
        let before = Some(prompts::by_ids(model.0.vocabulary() as usize, PAGE as usize));
        Section { fault: Some(fault), before, chunk: WHOLE_CHUNK, ..section }.with(cases)
    })
    .into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quick() -> Vec<Section> {
        all(None).unwrap()
    }

    #[test]
    fn vocabularies_are_those_of_the_models() {
        for section in quick() {
            let Subject::Embedded(model) = section.model else { panic!("{section:?}") };
            assert_eq!(model.open().unwrap().config().vocab, section.model.vocabulary() as usize);
        }
    }

    #[test]
    fn every_layout_meets_every_decode_in_both_kinds_of_arithmetic() {
        for arith in [ArithArg::Canonical, ArithArg::Fast] {
            for prefill in TP_SHARDED.into_iter().chain(CP_SHARDED).chain(["cp=2"]) {
                for decode in DECODES {
                    let meet = |section: &Section| {
                        section.pairs.iter().any(|pair| {
                            (section.prefills[pair.prefill], section.decodes[pair.decode])
                                == (prefill, decode)
                        })
                    };
                    let sections = quick();
                    assert!(
                        sections.iter().any(|section| section.arith == arith && meet(section)),
                        "{prefill} {decode}"
                    );
                }
            }
        }
    }

    /// What the pool cannot hold at the same time makes requests wait, and what it cannot keep is evicted.
    #[test]
    fn pressure_is_more_than_a_pool_holds_and_no_prompt_is_past_its_limit() {
        let sections = quick();
        let pressed: Vec<_> = sections.iter().filter(|section| section.title == "pressure").collect();
        assert_eq!(pressed.len(), 4);
        for section in pressed {
            let pool = section.pools[0].unwrap() as usize;
            assert!(section.longest() + 4 * PAGE as usize + 3 < pool);
            for case in section.cases() {
                assert!(case.lengths().sum::<usize>() > pool, "{case:?}");
            }
        }
    }

    #[test]
    fn prompts_that_go_on_begin_as_those_before_them() {
        let sections = quick();
        let mut met = 0;
        for case in sections.iter().filter(|s| s.title == "edges").flat_map(Section::cases) {
            if let [first, second] = case.asked.as_slice()
                && let (Some(0), Some(cached)) = (first.cached, second.cached)
            {
                let cached = cached as usize;
                assert!(first.prompt.ids.len() == cached + 1 && !(cached / 16).is_multiple_of(2));
                assert_eq!(first.prompt.ids[..cached], second.prompt.ids[..cached]);
                met += 1;
            }
        }
        assert_eq!(met, 3 * 2 * (2 + 2 + 3) * 3);
    }
}
