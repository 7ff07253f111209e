//! What is asked, from options or JSON, down to placements and page tables.

use std::{fs, io::Read, path::Path};

use kvferry_plan::{
    Axis, Blame, CacheShape, Dtype, Dtypes, LayoutSpec, PageId, PageTable, PartLayout, Placement, SlotId,
    Token, TokenMap, TokenRange, Unsupported,
};
use serde::Deserialize;

use super::{PlanArgs, shape};
use crate::{args::only_prefill, failure::Failure, terminal};

/// Larger requests are typing errors.
const MAX_TOKENS: u64 = 1 << 27;
/// Pages of a table that is made up here.
const MAX_PAGES: u32 = 1 << 22;
/// Bytes of a request file.
const MAX_FILE: u64 = 64 << 20;

/// A question that can be put to the planner.
pub(super) struct Request {
    pub(super) shape: CacheShape,
    /// How the shape was written.
    pub(super) model: String,
    pub(super) prefill: Side,
    pub(super) decode: Side,
    pub(super) tokens: TokenRange,
    /// Whether the element types of the two sides may differ.
    pub(super) dtypes: Dtypes,
}

/// One side of the question. Its layout may be one that this shape cannot have.
pub(super) struct Side {
    /// How the layout was written.
    pub(super) label: String,
    pub(super) placement: Result<Placement, String>,
    pub(super) pages: Pages,
    pub(super) slot: SlotId,
}

impl Side {
    /// Element type of what grows with tokens; `None` where nothing does, where parts differ, or where the layout cannot be.
    pub(super) fn kv(&self) -> Option<Dtype> {
        let mut rows = self.placement.as_ref().ok()?.parts.iter().filter(|layout| !layout.part.is_state());
        let dtype = rows.next()?.dtype;
        rows.all(|layout| layout.dtype == dtype).then_some(dtype)
    }
}

/// Which pages the request owns on a side.
#[derive(Clone)]
pub(super) enum Pages {
    Consecutive,
    Scattered,
    Given(PageTable),
}

/// The JSON form. docs/plan.md describes it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    model_shape: ShapeOrText,
    #[serde(default)]
    kv: Option<Dtype>,
    prefill: LayoutOrText,
    decode: LayoutOrText,
    tokens: Tokens,
    #[serde(default = "default_page")]
    page: u32,
    #[serde(default)]
    convert_kv: bool,
    #[serde(default)]
    scattered: bool,
    #[serde(default)]
    prefill_pages: Option<Vec<PageId>>,
    #[serde(default)]
    decode_pages: Option<Vec<PageId>>,
    #[serde(default)]
    prefill_slot: SlotId,
    #[serde(default)]
    decode_slot: SlotId,
}

#[derive(Deserialize)]
#[serde(
    untagged,
    expecting = "`model_shape` is a text such as \"mla:61x576xbf16\", or an object with `parts`"
)]
enum ShapeOrText {
    Text(String),
    Shape(CacheShape),
}

#[derive(Deserialize)]
#[serde(
    untagged,
    expecting = "a side is a text such as \"tp=2,page=16\", or an object with `stages`, `cp`, `tp` and `parts`"
)]
enum LayoutOrText {
    Text(String),
    Placement(Placement),
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "`tokens` is a number, or an object with `start` and `end`")]
enum Tokens {
    Count(u64),
    Range { start: u64, end: u64 },
}

fn default_page() -> u32 {
    16
}

impl Request {
    pub(super) fn read(args: &PlanArgs) -> Result<Self, Failure> {
        match (&args.request, &args.model_shape) {
            (Some(file), _) => {
                let text = read(file)?;
                let document = serde_json::from_str(&text).map_err(|e| {
                    Failure::caller(format_args!("{}: {e}; docs/plan.md has the schema", name_of(file)))
                })?;
                Self::from_document(document)
            }
            (None, Some(shape)) => Self::from_document(Document {
                model_shape: ShapeOrText::Text(shape.clone()),
                kv: None,
                prefill: LayoutOrText::Text(args.prefill.clone()),
                decode: LayoutOrText::Text(args.decode.clone()),
                tokens: tokens(&args.tokens)
                    .map_err(|why| Failure::caller(format_args!("--tokens {}: {why}", args.tokens)))?,
                page: args.page,
                convert_kv: args.convert_kv,
                scattered: args.scattered,
                prefill_pages: None,
                decode_pages: None,
                prefill_slot: SlotId(0),
                decode_slot: SlotId(0),
            }),
            (None, None) => Err(Failure::caller(
                "nothing says what is cached: give --model-shape SHAPE (such as mla:61x576xbf16), or a request as JSON \
                 in a FILE, or `-` for one on standard input",
            )),
        }
    }

    fn from_document(document: Document) -> Result<Self, Failure> {
        let (shape, kv, model) = match document.model_shape {
            ShapeOrText::Text(text) => {
                let (shape, kv) =
                    shape::parse(&text).map_err(|e| Failure::caller(format_args!("model shape {e}")))?;
                (shape, kv, text)
            }
            ShapeOrText::Shape(shape) => {
                shape.check().map_err(|e| Failure::caller(format_args!("model shape: {e}")))?;
                (shape, Dtype::Bf16, "as given".into())
            }
        };
        let kv = document.kv.unwrap_or(kv);
        let tokens = match document.tokens {
            Tokens::Count(count) => TokenRange::new(0, count),
            Tokens::Range { start, end } => TokenRange::new(start, end),
        };
        if tokens.end < tokens.start {
            return Err(Failure::caller(format_args!(
                "tokens {}..{}: the range ends before it starts",
                tokens.start, tokens.end
            )));
        }
        if tokens.is_empty() || tokens.end > Token(MAX_TOKENS) {
            return Err(Failure::caller(format_args!(
                "tokens {tokens}: 1 to {} tokens are possible",
                terminal::number(MAX_TOKENS)
            )));
        }
        let side = |name, layout, pages: Option<Vec<PageId>>, slot| {
            let pages = match pages {
                Some(pages) => Pages::Given(PageTable(pages)),
                None if document.scattered => Pages::Scattered,
                None => Pages::Consecutive,
            };
            let (placement, label) = match layout {
                LayoutOrText::Text(text) => layout_of(&text, document.page, &shape, kv)
                    .map_err(|e| Failure::caller(format_args!("{name}: {e}")))?,
                LayoutOrText::Placement(placement) => (Ok(placement), "as given".into()),
            };
            Ok::<_, Failure>(Side { label, placement, pages, slot })
        };
        let prefill = side("prefill", document.prefill, document.prefill_pages, document.prefill_slot)?;
        let mut decode = side("decode", document.decode, document.decode_pages, document.decode_slot)?;
        decode.placement = decode.placement.and_then(decodes);
        let dtypes = if document.convert_kv { Dtypes::Converted } else { Dtypes::Equal };
        Ok(Self { shape, model, prefill, decode, tokens, dtypes })
    }
}

/// The placement that a specification means for a shape, or why the shape cannot have it; and the specification in full.
fn layout_of(
    text: &str,
    page: u32,
    shape: &CacheShape,
    kv: Dtype,
) -> Result<(Result<Placement, String>, String), kvferry_plan::SpecError> {
    let says_page = text.split(',').any(|item| item.trim().starts_with("page="));
    let spec: LayoutSpec = if says_page { text.parse()? } else { format!("{text},page={page}").parse()? };
    Ok((spec.placement(shape, kv).map_err(|e| e.to_string()), spec.to_string()))
}

/// The planner could go on, but instances refuse it: only prefill deals its pages.
fn decodes(placement: Placement) -> Result<Placement, String> {
    let sharded = |part: &PartLayout| matches!(part.tokens, TokenMap::PageSharded { .. });
    if placement.parts.iter().any(sharded) { Err(only_prefill("shard=on")) } else { Ok(placement) }
}

fn tokens(text: &str) -> Result<Tokens, String> {
    let number = |text: &str| text.parse::<u64>().map_err(|_| "write 32768 or 100..32768".to_owned());
    let Some((start, end)) = text.split_once("..") else { return number(text).map(Tokens::Count) };
    match (number(start)?, number(end)?) {
        (start, end) if end < start => {
            Err(format!("the range ends before it starts; {end}..{start} is one of {} tokens", start - end))
        }
        (start, end) => Ok(Tokens::Range { start, end }),
    }
}

/// A request's file as people call it.
fn name_of(file: &Path) -> String {
    if file == Path::new("-") { "standard input".into() } else { file.display().to_string() }
}

fn read(file: &Path) -> Result<String, Failure> {
    let fail = |e: std::io::Error| Failure::caller(format_args!("cannot read {}: {e}", name_of(file)));
    let mut text = String::new();
    let read = match file == Path::new("-") {
        true => std::io::stdin().take(MAX_FILE).read_to_string(&mut text),
        false => fs::File::open(file).and_then(|f| f.take(MAX_FILE).read_to_string(&mut text)),
    };
    read.map_err(fail)?;
    if text.len() as u64 == MAX_FILE {
        return Err(Failure::new(Blame::Caller, format_args!("{} is longer than 64 MiB", name_of(file))));
    }
    Ok(text)
}

impl Pages {
    /// The table that `tokens` need under `placement`.
    ///
    /// # Errors
    /// When it would be too long.
    pub(super) fn table(&self, placement: &Placement, tokens: TokenRange) -> Result<PageTable, Unsupported> {
        let pages = |layout: &PartLayout| {
            let owned = (0..layout.tokens.classes()).map(|class| layout.tokens.owned(tokens.end, class));
            owned.max().unwrap_or(0).div_ceil(u64::from(layout.page_size.max(1)))
        };
        // State has a slot and no pages.
        let rows = placement.parts.iter().filter(|layout| !layout.part.is_state());
        let pages = rows.map(pages).max().unwrap_or(0);
        let pages = u32::try_from(pages).unwrap_or(u32::MAX);
        if pages > MAX_PAGES && !matches!(self, Self::Given(_)) {
            let reason = format!(
                "{} pages; {} are planned at most: use larger pages",
                terminal::number(pages.into()),
                terminal::number(MAX_PAGES.into())
            );
            return Err(Unsupported { axis: Axis::Size, reason });
        }
        Ok(match self {
            Self::Given(table) => table.clone(),
            Self::Consecutive => PageTable::identity(pages),
            // An odd multiplier permutes a power of two: ids in no order, none twice.
            Self::Scattered => {
                let space = pages.saturating_mul(2).checked_next_power_of_two().unwrap_or(1 << 31);
                PageTable((0..pages).map(|i| PageId(i.wrapping_mul(0x9E37_79B1) % space)).collect())
            }
        })
    }
}
