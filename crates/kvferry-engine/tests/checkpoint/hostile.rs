//! Files that lie. Every one is answered by a checkpoint or an error that names file and place: no panic, no
//! memory out of proportion.

use crate::{
    alloc,
    writer::{Gguf, tiny},
};
use kvferry_engine::{
    chat::Message,
    checkpoint::{AttentionTensors, Blob, Checkpoint, LoadError},
};
use kvferry_plan::{Blame, LayerId};
use proptest::prelude::*;

/// Headroom for messages and tables, and the growth from the densest element type (144 bytes to 1 KiB of `f32`).
const SLACK: usize = 16 << 10;
const GROWTH: usize = 8;

/// Opens and reads all of a model, and watches memory.
fn exercise(open: impl FnOnce() -> Result<Checkpoint, LoadError>, size: usize) -> Result<(), LoadError> {
    let (result, largest) = alloc::largest(|| {
        let checkpoint = open()?;
        for layer in 0..checkpoint.config().layers {
            if let AttentionTensors::Gqa(attention) = checkpoint.layer(LayerId(layer as u32))?.attention {
                let _mla = attention.to_mla(checkpoint.config());
            }
        }
        checkpoint.embedding()?;
        checkpoint.head()?;
        checkpoint.final_norm()?;
        Ok(checkpoint)
    });
    assert!(largest <= SLACK + GROWTH * size, "{largest} bytes were asked for by a file of {size}");
    let checkpoint = result?;
    if let Some(tokenizer) = checkpoint.tokenizer()? {
        // A tokenizer may refuse a text, but not fall over.
        if let Ok(ids) = tokenizer.encode("ab ab 1→<tool>", true) {
            let _text = tokenizer.decode(&ids);
        }
    }
    if let Some(template) = checkpoint.chat_template()? {
        let hello = Message { role: "user".to_owned(), content: "a".to_owned() };
        let _text_or_refusal = template.render(&[hello], true);
    }
    Ok(())
}

fn gguf(bytes: Vec<u8>) -> Result<(), LoadError> {
    let size = bytes.len();
    exercise(|| Checkpoint::from_gguf("f.gguf", bytes.into()), size)
}

const CONFIG: &[u8] = include_bytes!("../data/qwen2_tiny/config.json");

/// A one-layer model in safetensors, small enough to be cut at every byte.
fn small_safetensors() -> (Vec<u8>, Vec<u8>) {
    let config = br#"{"model_type":"llama","hidden_size":4,"num_hidden_layers":1,"num_attention_heads":2,
        "num_key_value_heads":1,"intermediate_size":2,"vocab_size":2,"rms_norm_eps":1e-5,
        "max_position_embeddings":8,"tie_word_embeddings":true}"#;
    let shapes: [(&str, &[u64]); 11] = [
        ("model.embed_tokens", &[2, 4]),
        ("model.norm", &[4]),
        ("model.layers.0.input_layernorm", &[4]),
        ("model.layers.0.post_attention_layernorm", &[4]),
        ("model.layers.0.self_attn.q_proj", &[4, 4]),
        ("model.layers.0.self_attn.k_proj", &[2, 4]),
        ("model.layers.0.self_attn.v_proj", &[2, 4]),
        ("model.layers.0.self_attn.o_proj", &[4, 4]),
        ("model.layers.0.mlp.gate_proj", &[2, 4]),
        ("model.layers.0.mlp.up_proj", &[2, 4]),
        ("model.layers.0.mlp.down_proj", &[4, 2]),
    ];
    let (mut header, mut at) = (serde_json::Map::new(), 0);
    for (name, shape) in shapes {
        let end = at + 2 * shape.iter().product::<u64>();
        let info = serde_json::json!({ "dtype": "BF16", "shape": shape, "data_offsets": [at, end] });
        header.insert(format!("{name}.weight"), info);
        at = end;
    }
    let header = serde_json::to_vec(&header).unwrap();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header);
    file.extend((0..at).map(|i| i as u8));
    (config.to_vec(), file)
}

fn safetensors(config: &[u8], weights: Vec<u8>) -> Result<(), LoadError> {
    let size = weights.len() + config.len();
    exercise(|| Checkpoint::from_safetensors("f", config, weights.into()), size)
}

#[test]
fn a_file_cut_anywhere_is_refused() {
    let whole = tiny("llama").build();
    gguf(whole.clone()).unwrap();
    // The last tensor's padding may go.
    for length in 0..whole.len() - 32 {
        let error = gguf(whole[..length].to_vec()).unwrap_err();
        assert!(error.to_string().starts_with("f.gguf: "), "{error}");
    }
    let (config, whole) = small_safetensors();
    safetensors(&config, whole.clone()).unwrap();
    for length in 0..whole.len() {
        let error = safetensors(&config, whole[..length].to_vec()).unwrap_err();
        assert!(error.to_string().starts_with("f: "), "{error}");
    }
    for length in 0..config.len() {
        safetensors(&config[..length], whole.clone()).unwrap_err();
    }
}

/// Numbers on which arithmetic goes wrong.
fn nasty() -> impl Strategy<Value = Vec<u8>> {
    let wide = [0, 1, u64::MAX, u64::MAX - 7, 1 << 63, 1 << 62, 1 << 61, 1 << 32, (1 << 32) - 1, 1 << 31];
    prop_oneof![
        prop::sample::select(wide.to_vec()).prop_map(|value| value.to_le_bytes().to_vec()),
        prop::sample::select(vec![0, 1, u32::MAX, 1 << 31]).prop_map(|value| value.to_le_bytes().to_vec()),
        prop::collection::vec(any::<u8>(), 1..4),
    ]
}

fn damage() -> impl Strategy<Value = Vec<(prop::sample::Index, Vec<u8>)>> {
    prop::collection::vec((any::<prop::sample::Index>(), nasty()), 1..4)
}

/// Writes over bytes before `end`.
fn apply(damage: &[(prop::sample::Index, Vec<u8>)], file: &mut [u8], end: usize) {
    for (at, bytes) in damage {
        let at = at.index(end);
        for (to, from) in file[at..].iter_mut().zip(bytes) {
            *to = *from;
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(3000) })]

    #[test]
    fn damaged_gguf_is_answered(damage in damage(), qwen in any::<bool>()) {
        let mut file = tiny(if qwen { "qwen2" } else { "llama" }).build();
        // Mostly the metadata and the table; the rest is weights, where nothing is wrong.
        apply(&damage, &mut file, 3500);
        let _answered = gguf(file);
    }

    #[test]
    fn damaged_safetensors_are_answered(damage in damage()) {
        let (config, mut file) = small_safetensors();
        let end = file.len();
        apply(&damage, &mut file, end);
        let _answered = safetensors(&config, file);
    }

    #[test]
    fn damaged_configuration_is_answered(damage in damage(), number in any::<u64>(), which in 0usize..8) {
        let (config, weights) = small_safetensors();
        let mut scratched = config.clone();
        let end = scratched.len();
        apply(&damage, &mut scratched, end);
        let _answered = safetensors(&scratched, weights.clone());
        let mut edited: serde_json::Map<String, serde_json::Value> = serde_json::from_slice(&config).unwrap();
        let key = edited.keys().nth(which).cloned().unwrap();
        edited.insert(key, number.into());
        let _answered = safetensors(&serde_json::to_vec(&edited).unwrap(), weights);
    }
}

/// The message and the blame for a file that is wrong in one way.
#[track_caller]
fn says(file: &Gguf, blame: Blame, message: &str) {
    let error = gguf(file.build()).unwrap_err();
    assert_eq!(error.to_string(), message);
    assert_eq!(error.blame(), blame);
}

const DAMAGED: &str = "; the file is damaged, fetch it again and compare its checksum";
const OTHER: &str = "; use a llama, qwen2, deepseek_v3 or kimi_linear model in a supported encoding";

#[track_caller]
fn damaged(change: impl FnOnce(&mut Gguf), message: &str) {
    let mut file = tiny("llama");
    change(&mut file);
    says(&file, Blame::Environment, &format!("f.gguf: {message}{DAMAGED}"));
}

#[track_caller]
fn unsupported(change: impl FnOnce(&mut Gguf), message: &str) {
    let mut file = tiny("llama");
    change(&mut file);
    says(&file, Blame::Caller, &format!("f.gguf: {message}{OTHER}"));
}

#[test]
fn lies_about_counts_and_lengths() {
    let size = tiny("llama").build().len();
    damaged(
        |file| file.counts = Some((u64::MAX, 1)),
        &format!("header: 18446744073709551615 tensors cannot be in a file of {size} bytes"),
    );
    damaged(
        |file| file.counts = Some((1, 1 << 60)),
        &format!("header: 1152921504606846976 keys cannot be in a file of {size} bytes"),
    );
    let mut file = Gguf::new();
    file.raw("long", 8, u64::MAX.to_le_bytes().to_vec());
    says(
        &file,
        Blame::Environment,
        &format!(
            "f.gguf: key long: 18446744073709551615 bytes at offset 48 do not fit in a file of 64 bytes{DAMAGED}"
        ),
    );
    let mut file = Gguf::new();
    file.raw("list", 9, [4u32.to_le_bytes().as_slice(), &(1u64 << 62).to_le_bytes()].concat());
    let message = format!("f.gguf: key list: a list of 4611686018427387904 values overflows{DAMAGED}");
    says(&file, Blame::Environment, &message);
}

#[test]
fn lies_about_tensors() {
    damaged(
        |file| file.tensor_mut("blk.1.ffn_up.weight").shape = vec![1 << 32, 1 << 32],
        "tensor blk.1.ffn_up.weight: shape [4294967296, 4294967296] is impossible for blocks of 1",
    );
    damaged(
        |file| file.tensor_mut("blk.1.ffn_up.weight").shape = vec![0, 8],
        "tensor blk.1.ffn_up.weight: shape [0, 8] is impossible for blocks of 1",
    );
    damaged(
        |file| file.tensor_mut("blk.1.ffn_up.weight").shape = vec![],
        "tensor blk.1.ffn_up.weight: 0 axes are not between 1 and 4",
    );
    damaged(
        |file| file.tensor_mut("blk.0.attn_q.weight").kind = 12,
        "tensor blk.0.attn_q.weight: shape [8, 8] is impossible for blocks of 256",
    );
    damaged(
        |file| file.tensor_mut("blk.0.attn_q.weight").offset = Some(7),
        "tensor blk.0.attn_q.weight: offset 7 is no multiple of 32",
    );
    damaged(
        |file| file.tensor_mut("blk.0.attn_q.weight").offset = Some(u64::MAX - 31),
        "tensor blk.0.attn_q.weight: 256 bytes at data offset 18446744073709551584 do not fit in 4576 bytes of data",
    );
    damaged(
        |file| file.tensor_mut("blk.0.attn_norm.weight").offset = Some(0),
        "tensor blk.0.attn_norm.weight: shares bytes with tensor token_embd.weight",
    );
    damaged(
        |file| {
            let twin = file.tensors[0].clone();
            file.tensors.push(twin);
        },
        "tensor token_embd.weight: occurs twice",
    );
    unsupported(
        |file| file.tensor_mut("blk.0.attn_q.weight").kind = 16,
        "tensor blk.0.attn_q.weight: element type 16 is not one of F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, \
         Q4_K, Q5_K, Q6_K",
    );
    unsupported(
        |file| {
            file.tensor("blk.0.attn_q_norm.weight", &[1], &[1.0]);
        },
        "tensor blk.0.attn_q_norm.weight: a Llama model as this engine knows it has no such tensor",
    );
    let missing = tiny("llama").without("blk.1.ffn_down.weight");
    says(
        &missing,
        Blame::Environment,
        "f.gguf: tensor blk.1.ffn_down.weight is missing; the file is incomplete or of another architecture",
    );
    let mut file = tiny("llama");
    file.tensor_mut("blk.0.attn_v.weight").shape = vec![8, 4];
    says(
        &file,
        Blame::Environment,
        "f.gguf: tensor blk.0.attn_v.weight has shape [8, 4], its configuration asks for [4, 8]; \
         the file is damaged or mixes two models",
    );
}

#[test]
fn lies_about_metadata() {
    damaged(
        |file| {
            let twin = file.keys[0].clone();
            file.keys.push(twin);
        },
        "key general.architecture: occurs twice",
    );
    damaged(
        |file| {
            file.raw("general.note", 8, [1u64.to_le_bytes().as_slice(), &[255]].concat());
        },
        "key general.note: the text at offset 1177 is not UTF-8",
    );
    damaged(
        |file| {
            file.raw("odd", 99, vec![]);
        },
        "key odd: value type 99 is unknown",
    );
    damaged(
        |file| {
            file.number("llama.attention.head_count", 0);
        },
        "key llama.attention.head_count: 0 heads do not divide a width of 8",
    );
    damaged(
        |file| {
            file.number("llama.attention.head_count_kv", 0);
        },
        "key key/value heads: 0 is not between 1 and 1048576",
    );
    damaged(
        |file| {
            file.number("llama.block_count", u32::MAX);
        },
        "key layers: 4294967295 is not between 1 and 1048576",
    );
    damaged(
        |file| {
            file.real("llama.rope.freq_base", f32::NAN);
        },
        "key rope theta: NaN is not a positive number",
    );
    damaged(
        |file| {
            file.text("llama.block_count", "two");
        },
        "key llama.block_count: is not an unsigned 32-bit number",
    );
    damaged(
        |file| {
            file.number("tokenizer.ggml.eos_token_id", 12);
        },
        "key special tokens: token 12 is outside the vocabulary of 12",
    );
    damaged(
        |file| {
            file.number("general.alignment", 24);
        },
        "key general.alignment: is not a power of two up to 1048576",
    );
    unsupported(
        |file| file.version = 0x0300_0000,
        "header: version 50331648 is not 2 or 3 in little-endian order",
    );
    unsupported(
        |file| {
            file.text("general.architecture", "evil\u{1b}[2J");
        },
        "key general.architecture: there is no engine for evil\\u{1b}[2J",
    );
    unsupported(
        |file| {
            file.text("llama.rope.scaling.type", "yarn");
        },
        "key llama.rope.scaling.type: rotary scaling yarn",
    );
    unsupported(
        |file| {
            file.number("llama.expert_count", 8);
        },
        "key llama.expert_count: a mixture of experts",
    );
    says(
        &tiny("llama").without("llama.context_length"),
        Blame::Environment,
        "f.gguf: key llama.context_length is missing; the file is incomplete or of another architecture",
    );
}

/// One more layer than there are tensors for, and layers by the million: the first missing tensor ends it.
#[test]
fn layers_that_are_not_there_are_missed_at_once() {
    let mut file = tiny("llama");
    file.number("llama.block_count", 1_000_000);
    let error = gguf(file.build()).unwrap_err();
    assert!(error.to_string().contains("tensor blk.2.attn_norm.weight is missing"), "{error}");
    let checkpoint = Checkpoint::from_gguf("f.gguf", tiny("llama").build().into()).unwrap();
    let error = checkpoint.layer(LayerId(2)).unwrap_err();
    assert_eq!(
        error.to_string(),
        "f.gguf: layer 2 does not exist, the model has 2 layers; ask for a smaller one"
    );
}

#[test]
fn lies_in_a_tokenizer() {
    let error = |change: &dyn Fn(&mut Gguf)| {
        let mut file = tiny("llama");
        change(&mut file);
        gguf(file.build()).unwrap_err().to_string()
    };
    let tokens = "f.gguf: key tokenizer.ggml.tokens: ";
    let merges = "f.gguf: key tokenizer.ggml.merges: ";
    let repeated = error(&|file| {
        file.texts("tokenizer.ggml.tokens", &["a", "b", "a"]);
    });
    assert_eq!(repeated, format!("{tokens}token 2 repeats token 0{DAMAGED}"));
    let names: Vec<String> = (0..13).map(|i| i.to_string()).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let many = error(&|file| {
        file.texts("tokenizer.ggml.tokens", &names);
    });
    assert_eq!(many, format!("{tokens}13 tokens exceed the vocabulary of 12{DAMAGED}"));
    let single = error(&|file| {
        file.texts("tokenizer.ggml.merges", &["ab"]);
    });
    assert_eq!(single, format!("{merges}merge 0 is not a pair of tokens{DAMAGED}"));
    // Longer than every token: the tokenizer library would index past its buffer.
    let long = error(&|file| {
        file.texts("tokenizer.ggml.merges", &["<|begin|> <|begin|>"]);
    });
    assert_eq!(
        long,
        format!(
            "{merges}the tokenizer is not usable: merges use \"<|begin|><|begin|>\", which is no token{DAMAGED}"
        )
    );
    let template = error(&|file| {
        file.text("tokenizer.chat_template", "{% for %}");
    });
    assert!(
        template.starts_with("f.gguf: key tokenizer.chat_template: the chat template does not work"),
        "{template}"
    );
}

#[test]
fn lies_in_safetensors() {
    let weights = |header: &str, data: usize| {
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend(header.as_bytes());
        file.resize(file.len() + data, 0);
        file
    };
    let says = |file: Vec<u8>, message: &str| {
        assert_eq!(safetensors(CONFIG, file).unwrap_err().to_string(), format!("f: {message}{DAMAGED}"));
    };
    says(vec![0; 7], "header: a file of 7 bytes has no header length");
    says(
        [u64::MAX.to_le_bytes().as_slice(), b"{}"].concat(),
        "header: a header of 18446744073709551615 bytes does not fit in a file of 10 bytes",
    );
    says(
        weights("[1]", 0),
        "header: is not readable: invalid type: sequence, expected an object of tensors at line 1 column 0",
    );
    let one = |shape: &str, offsets: &str| {
        weights(&format!(r#"{{"a":{{"dtype":"F32","shape":{shape},"data_offsets":{offsets}}}}}"#), 8)
    };
    says(one("[2]", "[0,4]"), "tensor a: offsets 0..4 do not hold the 8 bytes of its shape");
    says(one("[2]", "[8,0]"), "tensor a: offsets 8..0 do not hold the 8 bytes of its shape");
    says(one("[2]", "[4,12]"), "tensor a: offsets 4..12 are outside of 8 bytes of data");
    says(one("[4611686018427387904,4]", "[0,0]"), "tensor a: shape [4611686018427387904, 4] is impossible");
    says(
        one("[2]", "[18446744073709551607,18446744073709551615]"),
        "tensor a: offsets 18446744073709551607..18446744073709551615 are outside of 8 bytes of data",
    );
    let entry = r#"{"dtype":"F32","shape":[2],"data_offsets":[0,8]}"#;
    says(weights(&format!(r#"{{"a":{entry},"b":{entry}}}"#), 8), "tensor b: shares bytes with tensor a");
    let (first, second) = (entry, r#"{"dtype":"F32","shape":[1],"data_offsets":[8,12]}"#);
    says(weights(&format!(r#"{{"a":{first},"a":{second}}}"#), 12), "tensor a: occurs twice");
    let error = safetensors(
        CONFIG,
        weights(&entry.replace("F32", "I64").replace('{', r#"{"a":{"#).replace("}", "}}"), 8),
    );
    assert_eq!(
        error.unwrap_err().to_string(),
        format!("f: tensor a: elements are I64, not F32, F16 or BF16{OTHER}")
    );
}

#[test]
fn what_is_no_model_is_called_so() {
    let error = Checkpoint::open("tests/checkpoint/main.rs".as_ref()).unwrap_err();
    assert_eq!(error.blame(), Blame::Caller);
    assert_eq!(
        error.to_string(),
        "tests/checkpoint/main.rs: not a model: it does not begin with \"GGUF\"; \
         name a GGUF file or a folder with config.json and *.safetensors"
    );
    let error = Checkpoint::open("tests".as_ref()).unwrap_err();
    assert!(error.to_string().starts_with("tests: not a model: the folder has no config.json;"), "{error}");
    let error = Checkpoint::open("/dev/null".as_ref()).unwrap_err();
    assert!(
        error.to_string().starts_with("/dev/null: not a model: it is neither a regular file nor a folder;")
    );
    let empty = tempfile::NamedTempFile::new().unwrap();
    assert!(Checkpoint::open(empty.path()).unwrap_err().to_string().contains("header: 4 bytes at offset 0"));
    assert!(matches!(Blob::map("/no/such".as_ref()), Err(LoadError::Read { .. })));
}
