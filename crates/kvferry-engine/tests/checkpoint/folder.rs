//! Hugging Face folders: values against the format's own reader, shards, and the spellings of a configuration.

use kvferry_engine::checkpoint::{
    AttentionTensors, Checkpoint, FfnTensors, GatedTensors, GqaTensors, LayerTensors, embedded,
};
use kvferry_plan::LayerId;
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use serde_json::{Map, Value, json};
use std::{collections::HashMap, fs, path::Path};

const LLAMA: &str = "tests/data/llama_tiny";
const QWEN2: &str = "tests/data/qwen2_tiny";

fn values(tensors: &SafeTensors<'_>, name: &str) -> Vec<f32> {
    let view = tensors.tensor(name).unwrap();
    assert_eq!(view.dtype(), Dtype::BF16);
    view.data()
        .chunks_exact(2)
        .map(|b| f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16))
        .collect()
}

fn layers(checkpoint: &Checkpoint) -> Vec<LayerTensors> {
    (0..checkpoint.config().layers).map(|layer| checkpoint.layer(LayerId(layer as u32)).unwrap()).collect()
}

#[test]
fn every_tensor_equals_the_reference_reader() {
    for (folder, biases) in [(LLAMA, false), (QWEN2, true)] {
        let checkpoint = Checkpoint::open(folder.as_ref()).unwrap();
        let file = fs::read(Path::new(folder).join("model.safetensors")).unwrap();
        let file = SafeTensors::deserialize(&file).unwrap();
        assert_eq!(checkpoint.config().qkv_bias, biases);
        assert_eq!(checkpoint.embedding().unwrap(), values(&file, "model.embed_tokens.weight"));
        assert_eq!(checkpoint.final_norm().unwrap(), values(&file, "model.norm.weight"));
        assert_eq!(checkpoint.head().unwrap().unwrap(), values(&file, "lm_head.weight"));
        for (i, layer) in layers(&checkpoint).into_iter().enumerate() {
            let want = |name: &str| values(&file, &format!("model.layers.{i}.{name}"));
            let bias = |name: &str| biases.then(|| want(&format!("self_attn.{name}_proj.bias")));
            let expected = LayerTensors {
                attn_norm: want("input_layernorm.weight"),
                attention: AttentionTensors::Gqa(GqaTensors {
                    q: want("self_attn.q_proj.weight"),
                    k: want("self_attn.k_proj.weight"),
                    v: want("self_attn.v_proj.weight"),
                    q_bias: bias("q"),
                    k_bias: bias("k"),
                    v_bias: bias("v"),
                    o: want("self_attn.o_proj.weight"),
                }),
                ffn_norm: want("post_attention_layernorm.weight"),
                ffn: FfnTensors::Dense(GatedTensors {
                    gate: want("mlp.gate_proj.weight"),
                    up: want("mlp.up_proj.weight"),
                    down: want("mlp.down_proj.weight"),
                }),
            };
            assert!(layer == expected, "{folder} layer {i}");
        }
    }
}

#[test]
fn the_embedded_model_is_the_one_in_the_folder() {
    let (inside, outside) = (embedded().unwrap(), Checkpoint::open(LLAMA.as_ref()).unwrap());
    assert_eq!(inside.config(), outside.config());
    assert_eq!(inside.digest(), outside.digest());
    assert_eq!(inside.name(), outside.name());
    assert!(layers(&inside) == layers(&outside));
}

/// Writes `llama_tiny` as shards, each tensor in the shard that `place` names.
fn shard(folder: &Path, place: impl Fn(&str) -> &'static str) -> Map<String, Value> {
    fs::copy(Path::new(LLAMA).join("config.json"), folder.join("config.json")).unwrap();
    let file = fs::read(Path::new(LLAMA).join("model.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&file).unwrap();
    let mut shards: HashMap<&str, Vec<(String, TensorView<'_>)>> = HashMap::new();
    let mut map = Map::new();
    for (name, view) in tensors.tensors() {
        map.insert(name.clone(), place(&name).into());
        shards.entry(place(&name)).or_default().push((name, view));
    }
    for (name, tensors) in shards {
        fs::write(folder.join(name), safetensors::serialize(tensors, None).unwrap()).unwrap();
    }
    index(folder, &map);
    map
}

fn index(folder: &Path, map: &Map<String, Value>) {
    let json = serde_json::to_vec(&json!({ "metadata": {}, "weight_map": map })).unwrap();
    fs::write(folder.join("model.safetensors.index.json"), json).unwrap();
}

#[test]
fn shards_are_one_model() {
    let folder = tempfile::tempdir().unwrap();
    let place = |name: &str| if name.contains("layers.1") { "two.safetensors" } else { "one.safetensors" };
    let mut map = shard(folder.path(), place);
    let whole = Checkpoint::open(LLAMA.as_ref()).unwrap();
    let sharded = Checkpoint::open(folder.path()).unwrap();
    assert!(layers(&whole) == layers(&sharded));
    assert!(whole.embedding().unwrap() == sharded.embedding().unwrap());
    assert_ne!(whole.digest(), sharded.digest());

    let error = |map: &Map<String, Value>| {
        index(folder.path(), map);
        Checkpoint::open(folder.path()).unwrap_err().to_string()
    };
    map.insert("model.norm.weight".into(), "two.safetensors".into());
    let text = error(&map);
    assert!(text.contains("two.safetensors: tensor model.norm.weight is missing"), "{text}");
    map.insert("model.norm.weight".into(), "../one.safetensors".into());
    let text = error(&map);
    assert!(
        text.contains("index.json: tensor model.norm.weight: its shard is not a plain file name"),
        "{text}"
    );
    map.insert("model.norm.weight".into(), "three.safetensors".into());
    fs::copy(folder.path().join("one.safetensors"), folder.path().join("three.safetensors")).unwrap();
    let text = error(&map);
    assert!(text.contains("three.safetensors: tensor ") && text.contains(": occurs twice"), "{text}");
}

/// `llama_tiny` with another configuration.
fn configured(edit: impl FnOnce(&mut Map<String, Value>)) -> Result<Checkpoint, String> {
    let mut config: Map<String, Value> =
        serde_json::from_slice(include_bytes!("../data/llama_tiny/config.json")).unwrap();
    edit(&mut config);
    let weights: &'static [u8] = include_bytes!("../data/llama_tiny/model.safetensors");
    Checkpoint::from_safetensors("c", &serde_json::to_vec(&config).unwrap(), weights.into())
        .map_err(|error| error.to_string())
}

#[test]
fn both_spellings_of_theta_and_absent_head_dim() {
    let theta = |edit: fn(&mut Map<String, Value>)| configured(edit).unwrap().config().rope_theta;
    assert_eq!(theta(|_| ()), 10_000.0);
    let new =
        |c: &mut Map<String, Value>| drop(c.insert("rope_parameters".into(), json!({ "rope_theta": 5e5 })));
    assert_eq!(theta(new), 5e5);
    let old = |c: &mut Map<String, Value>| {
        c.remove("rope_parameters");
        c.insert("rope_theta".into(), json!(1e6));
        c.insert("rope_scaling".into(), Value::Null);
    };
    assert_eq!(theta(old), 1e6);
    let without = configured(|c| drop(c.remove("head_dim"))).unwrap();
    assert_eq!(without.config().head_dim, 16);
    let eos = configured(|c| drop(c.insert("eos_token_id".into(), json!([2, 5])))).unwrap();
    assert_eq!(eos.config().eos, [2, 5]);
}

#[test]
fn models_that_compute_otherwise_are_refused() {
    let refused = |key: &str, value: Value| configured(|c| drop(c.insert(key.into(), value))).unwrap_err();
    let other = "; use a llama, qwen2, deepseek_v3 or kimi_linear model in a supported encoding";
    for (key, value, reason) in [
        ("model_type", json!("mamba"), "there is no engine for mamba"),
        ("hidden_act", json!("gelu"), "\"gelu\" is not \"silu\""),
        ("rope_scaling", json!({ "rope_type": "llama3" }), "rope type \\\"llama3\\\" is not \"default\""),
        ("use_sliding_window", json!(true), "is on"),
        ("sliding_window", json!(4), "4 is a window, all tokens are read here"),
        ("quantization_config", json!({ "quant_method": "fp8" }), "quantized folders are not read"),
        ("layer_types", json!(["sliding_attention"]), "not every layer is \"full_attention\""),
    ] {
        assert_eq!(refused(key, value), format!("c: key {key}: {reason}{other}"));
    }
    for off in [("sliding_window", Value::Null), ("quantization_config", Value::Null)] {
        configured(|c| drop(c.insert(off.0.into(), off.1))).unwrap();
    }
    assert!(
        refused("attention_bias", json!(true))
            .contains("tensor model.layers.0.self_attn.q_proj.bias is missing")
    );
    assert!(refused("vocab_size", json!(513)).contains(
        "tensor model.embed_tokens.weight has shape [512, 128], its configuration asks for [513, 128]"
    ));
    assert!(refused("num_hidden_layers", json!(3)).contains("has no such tensor"));
    assert!(refused("num_key_value_heads", json!(3)).contains("8 query heads are no multiple of 3 kv heads"));
    assert!(
        configured(|c| drop(c.remove("hidden_size"))).unwrap_err().contains("key hidden_size is missing")
    );
}

#[test]
fn generation_config_adds_ends_of_text() {
    let folder = tempfile::tempdir().unwrap();
    for file in ["config.json", "model.safetensors"] {
        fs::copy(Path::new(LLAMA).join(file), folder.path().join(file)).unwrap();
    }
    fs::write(folder.path().join("generation_config.json"), r#"{"eos_token_id":[7,2]}"#).unwrap();
    assert_eq!(Checkpoint::open(folder.path()).unwrap().config().eos, [2, 7]);
}
