//! The one capacity function against models that count.

#![allow(clippy::unwrap_used)]

use kvferry_plan::{CacheShape, Capacity, Dtype, Fit, Hold, LayoutSpec, Limit, Need, Placement, Token};
use proptest::prelude::*;

fn placement(dcp: u32, interleave: u32, page: u32) -> Placement {
    let text = if dcp > 1 {
        format!("tp={dcp},dcp={dcp},interleave={interleave},page={page}")
    } else {
        format!("tp=1,page={page}")
    };
    text.parse::<LayoutSpec>().unwrap().placement(&CacheShape::mla(1, 8), Dtype::F32).unwrap()
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

fn holds() -> impl Strategy<Value = Hold> {
    prop_oneof![Just(Hold::Prompt), Just(Hold::Continue), Just(Hold::Whole)]
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
        (dcp, interleave, page) in (1_u32..4, 1_u32..4, 1_u32..6),
        pages in 0_u32..8, len in 0_u64..60, made_for in 0_u64..60, free in 0_u32..9,
        prompt in 1_u64..70, max_tokens in 1_u32..40, hold in holds(),
    ) {
        let placement = placement(dcp, interleave, page);
        let (len, free) = (len.min(made_for), free.min(pages));
        let capacity =
            Capacity { max_model_len: len, made_for, pages, parts: placement.parts.clone() };
        let best = match hold {
            Hold::Prompt => (prompt < len).then_some((prompt, max_tokens)),
            _ => (1..=max_tokens)
                .rev()
                .map(|answer| (prompt + u64::from(answer), answer))
                .find(|(tokens, _)| *tokens <= len && touched(&placement, *tokens) <= pages),
        };
        let best = best.map(|(tokens, answer)| (touched(&placement, tokens), answer));
        let best = best.filter(|(needed, _)| *needed <= pages);
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

    /// A registration may say anything.
    #[test]
    fn no_number_makes_it_panic(
        len: u64, made_for: u64, pages: u32, page_size: u32, ranks: u32, interleave: u32,
        prompt: u64, max_tokens: u32, free: u32, hold in holds(),
    ) {
        let mut parts = placement(2, 1, 4).parts;
        for part in &mut parts {
            part.page_size = page_size;
            part.tokens = kvferry_plan::TokenMap::Interleaved { ranks, interleave };
        }
        let capacity = Capacity { max_model_len: len, made_for, pages, parts };
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
    let pool = Capacity { max_model_len: 4096, made_for: 4096, pages: 4, parts: parts.clone() };
    let text = never(&pool, Hold::Whole, 64).to_string();
    assert!(text.contains("the limit is 63 (the KV pool of 4 pages holds 64 tokens)"), "{text}");
    assert!(text.contains("raise --pool-tokens"), "{text}");
    assert_eq!(never(&pool, Hold::Prompt, 65).limit, 64);
    let short = Capacity { max_model_len: 32, made_for: 4096, pages: 400, parts: parts.clone() };
    let text = never(&short, Hold::Prompt, 32).to_string();
    assert!(text.contains("the limit is 31") && text.contains("raise --max-model-len, up to 4096"), "{text}");
    let whole = Capacity { max_model_len: 4096, made_for: 4096, pages: 400, parts };
    let text = never(&whole, Hold::Continue, 5000).to_string();
    assert!(text.contains("the model was made for 4096") && !text.contains("--max-model-len"), "{text}");
    // It travels as JSON.
    let back: Capacity = serde_json::from_str(&serde_json::to_string(&whole).unwrap()).unwrap();
    assert_eq!(back, whole);
    let limit = never(&pool, Hold::Whole, 64);
    let back: Limit = serde_json::from_str(&serde_json::to_string(&limit).unwrap()).unwrap();
    assert_eq!(back, limit);
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
    draft.tokens = kvferry_plan::TokenMap::Dense;
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
    sharded.parts[0].tokens = kvferry_plan::TokenMap::PageSharded { ranks: 1 };
    assert_eq!(sharded.prefix_block().map(|block| (block.pages, block.tokens)), Some((1, 4)));
    sharded.parts.clear();
    assert_eq!(sharded.prefix_block(), None);
    // Hostile numbers.
    for (ranks, interleave, page_size) in
        [(0, 1, 1), (1, 0, 1), (1, 1, 0), (u32::MAX, u32::MAX, u32::MAX - 1)]
    {
        let mut odd = placement(1, 1, 4);
        odd.parts[0].tokens = kvferry_plan::TokenMap::Interleaved { ranks, interleave };
        odd.parts[0].page_size = page_size;
        let _ = odd.prefix_block();
    }
}
