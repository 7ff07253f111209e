//! The one capacity function against models that count.

#![allow(clippy::unwrap_used)]

use kvferry_plan::{
    AdmissionPath, CacheShape, Capacity, Dtype, Fit, Hold, LayoutSpec, Limit, Need, Placement, Token,
    TokenMap,
};
use proptest::prelude::*;

fn layout(text: &str) -> Placement {
    text.parse::<LayoutSpec>().unwrap().placement(&CacheShape::mla(1, 8), Dtype::F32).unwrap()
}

fn placement(dcp: u32, interleave: u32, page: u32) -> Placement {
    layout(&if dcp > 1 {
        format!("tp={dcp},dcp={dcp},interleave={interleave},page={page}")
    } else {
        format!("tp=1,page={page}")
    })
}

fn sharded(ranks: u32, page: u32) -> Placement {
    layout(&if ranks > 1 { format!("tp={ranks},shard=on,page={page}") } else { format!("tp=1,page={page}") })
}

/// Of a model without an end, so that only the pool limits.
fn pool(placement: &Placement, pages: u32) -> Capacity {
    let parts = placement.parts.clone();
    Capacity { max_model_len: u64::MAX, made_for: u64::MAX, pages, parts, prefix_cache: false }
}

/// Pages that the ranks touch when they store `tokens` tokens one after the other.
fn touched(placement: &Placement, tokens: u64) -> u32 {
    let layout = placement.parts[0];
    (0..layout.tokens.classes())
        .flat_map(|class| (0..tokens).filter_map(move |token| layout.tokens.local(Token(token), class)))
        .map(|local| local / u64::from(layout.page_size) + 1)
        .max()
        .map_or(0, |pages| u32::try_from(pages).unwrap())
}

const PATHS: [AdmissionPath; 2] = [AdmissionPath::Normal, AdmissionPath::IgnoreEos];

fn holds() -> impl Strategy<Value = Hold> {
    let [normal, ignore_eos] = PATHS.map(|path| Just(Hold::Prompt(path)));
    prop_oneof![normal, ignore_eos, Just(Hold::Continue), Just(Hold::Whole)]
}

/// Whether the rules that were read off SGLang's `PrefillAdder` let a prompt into an empty pool of `pool` tokens.
fn lets_in(path: AdmissionPath, prompt: u64, pool: u64, page: u64, shard_ranks: u64) -> bool {
    let over = shard_ranks * page;
    let charged = prompt.div_ceil(page) * page + over;
    match path {
        AdmissionPath::Normal => prompt + 1 + over < pool,
        AdmissionPath::IgnoreEos => charged <= pool && (pool - charged).saturating_sub(1) > 1,
    }
}

proptest! {
    #[test]
    fn a_table_is_exactly_long_enough_for_the_fullest_rank(
        dcp in 1_u32..5, interleave in 1_u32..7, page in 1_u32..9, tokens in 0_u64..300,
    ) {
        let placement = placement(dcp, interleave, page);
        let pages = placement.pages_for(tokens).unwrap();
        prop_assert_eq!(pages, touched(&placement, tokens));
        prop_assert!(tokens <= placement.tokens_for(pages));
        prop_assert_eq!(placement.pages_for(placement.tokens_for(pages)), Some(pages));
        prop_assert!(placement.pages_for(placement.tokens_for(pages) + 1).unwrap() > pages);
    }

    /// The naive model tries every length of answer, longest first.
    #[test]
    fn fit_is_what_trying_every_length_finds(
        (ranks, interleave, page, shard) in (1_u32..4, 1_u32..4, 1_u32..6, any::<bool>()),
        share in 0_u32..8, len in 0_u64..60, made_for in 0_u64..60, free in 0_u32..9,
        prompt in 1_u64..70, max_tokens in 1_u32..40, hold in holds(),
    ) {
        let (placement, owners) =
            if shard { (sharded(ranks, page), ranks) } else { (placement(ranks, interleave, page), 1) };
        let (len, pages) = (len.min(made_for), share * owners);
        let free = free.min(share) * owners;
        let capacity = Capacity { max_model_len: len, made_for, ..pool(&placement, pages) };
        let holds = (0..).take_while(|tokens| touched(&placement, *tokens) <= pages).last().unwrap();
        let per_page = u64::from(page) * u64::from(if shard { 1 } else { ranks });
        let best = match hold {
            Hold::Prompt(path) => (prompt < len && lets_in(path, prompt, holds, per_page, owners.into()))
                .then_some((prompt, max_tokens)),
            _ => (1..=max_tokens)
                .rev()
                .map(|answer| (prompt + u64::from(answer), answer))
                .find(|(tokens, _)| *tokens <= len && touched(&placement, *tokens) <= pages),
        };
        let best = best.map(|(tokens, answer)| (touched(&placement, tokens), answer));
        let need = Need { hold, prompt_tokens: prompt, max_tokens };
        let fit = capacity.fit(need, free);
        match (&fit, best) {
            (Fit::Now { pages, max_tokens }, Some(best)) => {
                prop_assert!(*pages <= free);
                prop_assert_eq!((*pages, *max_tokens), best);
            }
            (Fit::Later { pages, max_tokens }, Some(best)) => {
                prop_assert!(*pages > free);
                prop_assert_eq!((*pages, *max_tokens), best);
            }
            (Fit::Never(limit), None) => {
                prop_assert!(limit.tokens == prompt && limit.limit < prompt, "{limit}");
                prop_assert_eq!(limit.limit, capacity.longest(hold));
            }
            _ => prop_assert!(false, "{fit:?}, but {best:?}"),
        }
        // Never does not depend on what others hold, and the longest prompt is the last one that is served.
        let idle = capacity.fit(need, pages);
        let waits = matches!(idle, Fit::Later { .. });
        prop_assert!(!waits);
        prop_assert_eq!(matches!(idle, Fit::Never(_)), matches!(fit, Fit::Never(_)));
        prop_assert_eq!(matches!(fit, Fit::Never(_)), prompt > capacity.longest(hold));
    }

    /// Pages are dealt to their owners in turn from any of them on, and what can be had is what the rank with the fewest
    /// has: whoever is told `Now` gets them.
    #[test]
    fn now_is_enough_for_a_chain_that_begins_at_any_owner(
        ranks in 1_u32..6, page in 1_u32..5, free in proptest::collection::vec(0_u32..9, 6), prompt in 1_u64..80,
    ) {
        let free = &free[..ranks as usize];
        let need = Need { hold: Hold::Prompt(AdmissionPath::Normal), prompt_tokens: prompt, max_tokens: 1 };
        let floor = ranks * free.iter().min().unwrap();
        let fit = pool(&sharded(ranks, page), 100 * ranks).fit(need, floor);
        let Fit::Now { pages, .. } = fit else {
            prop_assert!(prompt.div_ceil(page.into()) > u64::from(floor), "{fit:?}");
            return Ok(());
        };
        for first in 0..ranks {
            let mut left = free.to_vec();
            for k in 0..pages {
                let of = &mut left[((first + k) % ranks) as usize];
                prop_assert!(*of > 0, "{pages} pages from owner {first} on, of {free:?}");
                *of -= 1;
            }
        }
    }

    /// What a limit says would have to change is the least that has to.
    #[test]
    fn a_pool_of_as_many_tokens_as_a_limit_names_is_the_smallest_that_is_enough(
        (ranks, interleave, page, shard) in (1_u32..5, 1_u32..4, 1_u32..7, any::<bool>()),
        prompt in 1_u64..200, hold in holds(),
    ) {
        let (text, owners) = match (shard && ranks > 1, ranks) {
            (true, _) => (format!("tp={ranks},shard=on,page={page}"), ranks),
            (false, 1) => (format!("page={page}"), 1),
            (false, _) => (format!("tp={ranks},dcp={ranks},interleave={interleave},page={page}"), 1),
        };
        let placement = layout(&text);
        let fits = |pages| match pool(&placement, pages).fit(
            Need { hold, prompt_tokens: prompt, max_tokens: 1 },
            pages,
        ) {
            Fit::Never(limit) => Err(limit.remedy),
            _ => Ok(()),
        };
        let remedy = fits(0).unwrap_err();
        let named: u64 = remedy.split_whitespace().find_map(|word| word.parse().ok()).unwrap();
        // As an engine takes it: whole pages, as many on every shard rank.
        let pages = placement.pages_for(named).unwrap().next_multiple_of(owners);
        prop_assert_eq!(fits(pages), Ok(()));
        prop_assert!(fits(pages - owners).is_err(), "{named} tokens: {pages} pages are too many");
        let enough = text.parse::<LayoutSpec>().unwrap().pool_for_prompt(prompt);
        if let Hold::Prompt(path) = hold {
            prop_assert!(named <= enough && (path == AdmissionPath::Normal || named == enough));
        }
    }

    /// A registration may say anything.
    #[test]
    fn no_number_makes_it_panic(
        len: u64, made_for: u64, pages: u32, page_size: u32, ranks: u32, interleave: u32,
        prompt: u64, max_tokens: u32, free: u32, hold in holds(), shard: bool, prefix_cache: bool,
    ) {
        let mut parts = placement(2, 1, 4).parts;
        for part in &mut parts {
            part.page_size = page_size;
            part.tokens =
                if shard { TokenMap::PageSharded { ranks } } else { TokenMap::Interleaved { ranks, interleave } };
        }
        let capacity = Capacity { max_model_len: len, made_for, pages, parts, prefix_cache };
        let fit = capacity.fit(Need { hold, prompt_tokens: prompt, max_tokens }, free);
        let _ = capacity.longest(hold);
        if let Fit::Now { pages: needed, max_tokens: answer } = fit {
            prop_assert!(needed <= free && answer <= max_tokens);
        }
    }
}

#[test]
fn a_limit_says_which_it_is_and_what_would_change_it() {
    let parts = placement(1, 1, 16).parts;
    let never = |capacity: &Capacity, hold, prompt_tokens| match capacity
        .fit(Need { hold, prompt_tokens, max_tokens: 1 }, capacity.pages)
    {
        Fit::Never(limit) => limit,
        fit => unreachable!("{fit:?}"),
    };
    let capacity = |max_model_len, pages| Capacity {
        max_model_len,
        made_for: 4096,
        pages,
        parts: parts.clone(),
        prefix_cache: false,
    };
    let pool = capacity(4096, 4);
    assert_eq!(
        never(&pool, Hold::Whole, 64).to_string(),
        "a prompt of 64 tokens can never be served here: the limit is 63 (the KV pool of 4 pages holds 64 tokens); raise \
         --pool-tokens to 65 or shorten the prompt"
    );
    assert_eq!(
        never(&pool, Hold::Prompt(pool.path(false)), 47).to_string(),
        "a prompt of 47 tokens can never be served here: the limit is 46 (the KV pool of 4 pages holds 64 tokens; the \
         normal path keeps back 16 (a page) and 2); raise --pool-tokens to 65 or shorten the prompt"
    );
    assert_eq!(
        never(&pool, Hold::Prompt(pool.path(true)), 33).to_string(),
        "a prompt of 33 tokens can never be served here: the limit is 32 (the KV pool of 4 pages holds 64 tokens; the path \
         of ignore_eos without a prefix cache keeps back 16 (a page) and 3, and counts whole pages); raise --pool-tokens to \
         67 or shorten the prompt"
    );
    // One that has a prefix cache has one path.
    assert_eq!(Capacity { prefix_cache: true, ..pool.clone() }.path(true), AdmissionPath::Normal);
    let shared_out = Capacity { parts: sharded(4, 16).parts, ..capacity(4096, 8) };
    let text = never(&shared_out, Hold::Prompt(AdmissionPath::Normal), 63).to_string();
    assert!(text.contains("keeps back 64 (a page on each of 4 ranks) and 2"), "{text}");
    // A larger pool alone would not help.
    let text = never(&pool, Hold::Prompt(AdmissionPath::Normal), 5000).to_string();
    assert!(text.contains("the limit is 46") && !text.contains("raise"), "{text}");
    assert!(text.contains("whatever the pool holds, the model was made for 4096 tokens"), "{text}");
    let text = never(&capacity(32, 400), Hold::Prompt(AdmissionPath::Normal), 32).to_string();
    assert!(text.contains("the limit is 31") && text.contains("raise --max-model-len, up to 4096"), "{text}");
    let whole = capacity(4096, 400);
    let text = never(&whole, Hold::Continue, 5000).to_string();
    assert!(text.contains("the model was made for 4096") && !text.contains("--max-model-len"), "{text}");
    // It travels as JSON.
    let back: Capacity = serde_json::from_str(&serde_json::to_string(&whole).unwrap()).unwrap();
    assert_eq!(back, whole);
    let limit = never(&pool, Hold::Whole, 64);
    let back: Limit = serde_json::from_str(&serde_json::to_string(&limit).unwrap()).unwrap();
    assert_eq!(back, limit);
}

fn vectors(name: &str) -> serde_json::Value {
    let path = format!("{}/tests/vectors/{name}.json", env!("CARGO_MANIFEST_DIR"));
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// The longest prompts that SGLang's scheduler lets into an empty pool, recorded from it. What it lets through before that
/// (`bootstrap_limit`) is not here: unsharded it is more than the scheduler ever takes.
#[test]
fn limits_are_the_recorded_ones() {
    let file = vectors("admission_limits");
    let rows = file["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 59);
    for row in rows {
        let number = |key: &str| row[key].as_u64().unwrap();
        let [ranks, page] = ["shard_size", "page_size"].map(|key| number(key) as u32);
        let pages = number("capacity") / u64::from(page);
        let capacity = pool(&sharded(ranks, page), pages as u32);
        assert_eq!(capacity.pool_tokens(), number("capacity"), "{row}");
        let [normal, ignore_eos] = PATHS.map(|path| capacity.longest(Hold::Prompt(path)));
        for key in ["normal_nochunk", "normal_chunked", "normal_radix_disabled_no_ignore_eos"] {
            assert_eq!(normal, number(key), "{key}: {row}");
        }
        for key in ["ignore_eos_radix_disabled_nochunk", "ignore_eos_radix_disabled_chunked"] {
            assert_eq!(ignore_eos, number(key), "{key}: {row}");
        }
        let cached = Capacity { prefix_cache: true, ..capacity };
        assert_eq!(
            cached.longest(Hold::Prompt(cached.path(true))),
            number("ignore_eos_radix_enabled"),
            "{row}"
        );
    }
}

/// Prompts that SGLang's scheduler lets in together, recorded from it: here they are let in as well.
#[test]
fn as_many_prompts_are_let_in_together_as_recorded() {
    let (mut together, mut more) = (0, 0);
    for row in vectors("chunks_and_scratch")["multi"].as_array().unwrap() {
        let number = |value: &serde_json::Value| value.as_u64().unwrap();
        let [ranks, page] = ["shard_size", "page_size"].map(|key| number(&row[key]) as u32);
        let pages = number(&row["tokens_per_rank"]) as u32 * ranks / page;
        let parts = sharded(ranks, page).parts;
        let prefix_cache = !row["radix_disabled"].as_bool().unwrap();
        let capacity = Capacity { parts, prefix_cache, ..pool(&sharded(ranks, page), pages) };
        let (mut free, mut admitted) = (pages, 0);
        for step in row["steps"].as_array().unwrap() {
            let hold = Hold::Prompt(capacity.path(step["ignore_eos"].as_bool().unwrap()));
            let need = Need { hold, prompt_tokens: number(&step["prompt_len"]), max_tokens: 1 };
            if let Fit::Now { pages, .. } = capacity.fit(need, free) {
                admitted += 1;
                // Whatever its first owner is, the rank with the fewest loses no more.
                free -= pages.div_ceil(ranks) * ranks;
            }
            assert!(admitted >= number(&step["admitted"]), "{row}");
            together += u32::from(admitted > 1);
            more += u32::from(admitted > number(&step["admitted"]));
        }
    }
    assert!(
        together > 10 && more > 0,
        "{together} steps with several prompts, {more} with more than recorded"
    );
}

proptest! {
    /// A block is whole on every rank, wherever it lies, and nothing smaller is.
    #[test]
    fn a_prefix_block_is_the_smallest_run_of_pages_that_is_whole_everywhere(
        dcp in 1_u32..5, interleave in 1_u32..9, page in 1_u32..9,
    ) {
        let placement = placement(dcp, interleave, page);
        let block = placement.prefix_block().unwrap();
        let map = placement.parts[0].tokens;
        let whole = |pages: u64, tokens: u64| {
            (0..dcp).all(|class| map.owned(Token(tokens), class) == pages * u64::from(page))
        };
        for k in 0..5 {
            prop_assert!(whole(k * u64::from(block.pages), k * block.tokens));
        }
        for pages in 1..u64::from(block.pages) {
            prop_assert!((0..=block.tokens).all(|tokens| !whole(pages, tokens)), "{pages} pages would do");
        }
    }
}

#[test]
fn what_cannot_be_cut_into_blocks_is_not_shared() {
    let mut other = placement(2, 1, 4);
    let mut draft = other.parts[0];
    draft.part = kvferry_plan::Part::DraftLatent;
    draft.tokens = TokenMap::Dense;
    // Dense draft rows on pages of a virtual page's tokens lie alike; on other pages they do not.
    draft.page_size = 8;
    other.parts.push(draft);
    assert_eq!(other.prefix_block().map(|block| (block.pages, block.tokens)), Some((1, 8)));
    other.parts[1].page_size = 4;
    assert_eq!(other.prefix_block(), None);
    let mut state = placement(1, 1, 4);
    // State has no part in it, wherever it lies; alone it has no pages.
    let rows = state.parts[0];
    state.parts[0].part = kvferry_plan::Part::Recurrent;
    assert_eq!(state.prefix_block(), None);
    state.parts.push(rows);
    assert_eq!(state.prefix_block().map(|block| (block.pages, block.tokens)), Some((1, 4)));
    let mut sharded = placement(1, 1, 4);
    sharded.parts[0].tokens = TokenMap::PageSharded { ranks: 1 };
    assert_eq!(sharded.prefix_block().map(|block| (block.pages, block.tokens)), Some((1, 4)));
    sharded.parts.clear();
    assert_eq!(sharded.prefix_block(), None);
    // Hostile numbers.
    for (ranks, interleave, page_size) in
        [(0, 1, 1), (1, 0, 1), (1, 1, 0), (u32::MAX, u32::MAX, u32::MAX - 1)]
    {
        let mut odd = placement(1, 1, 4);
        odd.parts[0].tokens = TokenMap::Interleaved { ranks, interleave };
        odd.parts[0].page_size = page_size;
        let _ = odd.prefix_block();
    }
}
