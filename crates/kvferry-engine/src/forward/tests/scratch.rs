//! What is taken at the start for pages that are dealt is enough for every step.

use super::*;

/// Steps that were offered to SGLang's admission (`chunks_and_scratch.json`, `scratch`). Some it put off, because all
/// prefixes of a step have to be in its buffer together; here one request's rows are put together at a time.
#[test]
fn no_recorded_step_needs_more_than_was_taken_at_the_start() {
    let path = folder("../../../kvferry-plan/tests/vectors/chunks_and_scratch.json");
    let file: serde_json::Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let model = model("llama_tiny", Attention::Mla, Arith::Fast);
    let mut put_off = 0;
    for row in file["scratch"].as_array().unwrap() {
        let [ranks, page] = ["shard_size", "page_size"].map(|name| row[name].as_u64().unwrap());
        let steps = row["steps"].as_array().unwrap();
        let length = |step: &serde_json::Value, name| step[name].as_u64().unwrap() as usize;
        let prompts = steps.iter().map(|step| (length(step, "prefix_len"), length(step, "extend_len")));
        let pages_of = |(prefix, extend): (usize, usize)| (prefix + extend).div_ceil(page as usize) + 1;
        let pool = prompts.clone().map(pages_of).sum::<usize>() as u64 + ranks * steps.len() as u64;
        let layout = format!("tp={ranks},shard=on,page={page}");
        let mut forward = build(&model, &layout, Dtype::Bf16, pool * page);
        let mut pages = pages(&forward);
        let mut sequences: Vec<Sequence> = prompts
            .map(|(prefix, extend)| {
                let prompt = prompt(prefix + extend, 5);
                let mut sequence = Sequence::new(&forward, &mut pages, &prompt, 0, extend);
                // What came before is zeros in the pool, which attention reads like anything else.
                sequence.filled = prefix;
                sequence
            })
            .collect();
        let taken = |forward: &Forward| -> Vec<usize> {
            (0..ranks as u32)
                .map(|rank| forward.ranks.seat(RankId(rank)).unwrap().attend.assembled())
                .collect()
        };
        let before = taken(&forward);
        assert_eq!(before, vec![forward.scratch(); ranks as usize]);
        run(&mut forward, &mut sequences);
        assert_eq!(taken(&forward), before, "{row}");
        put_off += steps.iter().filter(|step| step["ok"] == false).count();
    }
    assert!(put_off > 20, "{put_off}");
}
