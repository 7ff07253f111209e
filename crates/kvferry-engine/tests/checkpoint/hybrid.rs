//! Folders of DeepSeek V3 and Kimi Linear: other names of the same tensors, other element types, shards, and
//! configurations that this engine does not compute or that make no sense.

use kvferry_engine::checkpoint::{Checkpoint, LayerTensors};
use kvferry_plan::{Blame, LayerId};
use proptest::prelude::*;
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use serde_json::{Map, Value, json};
use std::{fs, path::Path};

const KIMI: &str = "tests/data/kimi_linear_tiny";
const DEEPSEEK: &str = "tests/data/deepseek_v3_tiny";

fn layers(checkpoint: &Checkpoint) -> Vec<LayerTensors> {
    (0..checkpoint.config().layers).map(|layer| checkpoint.layer(LayerId(layer as u32)).unwrap()).collect()
}

fn config(folder: &str) -> Map<String, Value> {
    serde_json::from_slice(&fs::read(Path::new(folder).join("config.json")).unwrap()).unwrap()
}

/// The tensors of a folder as `(name, shape, values)`.
fn tensors(folder: &str) -> Vec<(String, Vec<usize>, Vec<f32>)> {
    let file = fs::read(Path::new(folder).join("model.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&file).unwrap();
    let values = |view: &TensorView<'_>| {
        let pairs = view.data().chunks_exact(2);
        pairs.map(|b| f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16)).collect()
    };
    tensors.tensors().into_iter().map(|(name, view)| (name, view.shape().to_vec(), values(&view))).collect()
}

/// Writes tensors as `f32`, with the configuration of `folder`.
fn write(to: &Path, folder: &str, tensors: &[(String, Vec<usize>, Vec<f32>)]) {
    fs::copy(Path::new(folder).join("config.json"), to.join("config.json")).unwrap();
    let bytes: Vec<Vec<u8>> =
        tensors.iter().map(|(.., values)| values.iter().flat_map(|v| v.to_le_bytes()).collect()).collect();
    let views = tensors.iter().zip(&bytes).map(|((name, shape, _), bytes)| {
        (name.as_str(), TensorView::new(Dtype::F32, shape.clone(), bytes).unwrap())
    });
    fs::write(to.join("model.safetensors"), safetensors::serialize(views, None).unwrap()).unwrap();
}

/// What one library calls `block_sparse_moe` and `w1` to `w3`, another calls `mlp` and `gate_proj` to `up_proj`; for
/// the network of the first layer, which has no experts, published and converted files differ too.
#[test]
fn networks_of_kimi_linear_go_by_either_name() {
    let original = Checkpoint::open(KIMI.as_ref()).unwrap();
    let every = tensors(KIMI);
    for dense_only in [true, false] {
        let folder = tempfile::tempdir().unwrap();
        let renamed: Vec<_> = every
            .iter()
            .map(|(name, shape, values)| {
                let other = if dense_only && !name.starts_with("model.layers.0.") {
                    name.clone()
                } else {
                    [
                        ("block_sparse_moe", "mlp"),
                        (".w1.", ".gate_proj."),
                        (".w2.", ".down_proj."),
                        (".w3.", ".up_proj."),
                    ]
                    .iter()
                    .fold(name.clone(), |name, (from, to)| name.replace(from, to))
                };
                (other, shape.clone(), values.clone())
            })
            .collect();
        assert!(renamed.iter().zip(&every).any(|(a, b)| a.0 != b.0));
        write(folder.path(), KIMI, &renamed);
        // Also another element type: `f32` instead of `bf16`, in one file.
        assert!(layers(&Checkpoint::open(folder.path()).unwrap()) == layers(&original));
    }
}

#[test]
fn layers_that_guess_ahead_are_not_read() {
    let mut every = tensors(DEEPSEEK);
    every.push(("model.layers.4.eh_proj.weight".into(), vec![2, 2], vec![0.0; 4]));
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), DEEPSEEK, &every);
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    assert_eq!((checkpoint.config().layers, checkpoint.config().draft_layers), (4, 1));
    every.push(("model.layers.5.eh_proj.weight".into(), vec![2, 2], vec![0.0; 4]));
    write(folder.path(), DEEPSEEK, &every);
    let error = Checkpoint::open(folder.path()).unwrap_err().to_string();
    assert!(error.contains("tensor model.layers.5.eh_proj.weight: a DeepseekV3 model"), "{error}");
}

/// Rotary rows that lie in halves already stay where they are.
#[test]
fn rotary_rows_are_put_into_halves_unless_they_are() {
    let open = |interleave: Value| {
        let mut config = config(DEEPSEEK);
        config.insert("rope_interleave".into(), interleave);
        let weights: &'static [u8] = include_bytes!("../data/deepseek_v3_tiny/model.safetensors");
        Checkpoint::from_safetensors("c", &serde_json::to_vec(&config).unwrap(), weights.into()).unwrap()
    };
    assert!(layers(&open(Value::Null)) == layers(&open(json!(true))));
    assert!(layers(&open(json!(false))) != layers(&open(json!(true))));
}

fn configured(folder: &str, edit: impl FnOnce(&mut Map<String, Value>)) -> Result<Checkpoint, String> {
    let mut config = config(folder);
    edit(&mut config);
    let weights = fs::read(Path::new(folder).join("model.safetensors")).unwrap();
    Checkpoint::from_safetensors("c", &serde_json::to_vec(&config).unwrap(), weights.into()).map_err(
        |error| {
            assert!(matches!(error.blame(), Blame::Caller | Blame::Environment));
            error.to_string()
        },
    )
}

#[test]
fn what_is_computed_otherwise_or_makes_no_sense_is_refused() {
    let linear = |key: &'static str, value: Value| {
        move |c: &mut Map<String, Value>| {
            let inner = c.get_mut("linear_attn_config").unwrap().as_object_mut().unwrap();
            inner.insert(key.into(), value);
        }
    };
    let top =
        |key: &'static str, value: Value| move |c: &mut Map<String, Value>| drop(c.insert(key.into(), value));
    for (folder, edit, reason) in [
        (
            KIMI,
            Box::new(top("mla_use_nope", json!(false))) as Box<dyn FnOnce(&mut Map<String, Value>)>,
            "mla_use_nope: is off",
        ),
        (KIMI, Box::new(top("moe_router_activation_func", json!("softmax"))), "is not \"sigmoid\""),
        (KIMI, Box::new(top("moe_layer_freq", json!(2))), "only some layers have experts"),
        (KIMI, Box::new(top("attention_bias", json!(true))), "attention_bias: is on"),
        (KIMI, Box::new(top("linear_attn_config", Value::Null)), "key linear_attn_config is missing"),
        (KIMI, Box::new(top("kv_lora_rank", json!(0))), "key latent size: 0 is not between 1 and"),
        (
            KIMI,
            Box::new(top("num_experts_per_token", json!(9))),
            "key experts per token: 9 is not between 1 and 8",
        ),
        (KIMI, Box::new(top("num_expert_group", json!(3))), "8 experts make no 3 groups"),
        (
            KIMI,
            Box::new(top("num_experts", json!(7))),
            "tensor model.layers.1.block_sparse_moe.gate.weight has shape",
        ),
        (
            KIMI,
            Box::new(linear("kda_layers", json!([1, 2, 3, 5, 6]))),
            "a list of each of the layers 1 to 8 once",
        ),
        (
            KIMI,
            Box::new(linear("kda_layers", json!([1, 2, 3, 5, 6, 6]))),
            "a list of each of the layers 1 to 8 once",
        ),
        (
            KIMI,
            Box::new(linear("kda_layers", json!([0, 2, 3, 5, 6, 7]))),
            "a list of each of the layers 1 to 8 once",
        ),
        (KIMI, Box::new(linear("head_dim", json!(1 << 19))), "key linear attention head dimension"),
        (KIMI, Box::new(linear("short_conv_kernel_size", json!(1))), "1 tap leaves no state"),
        (DEEPSEEK, Box::new(top("topk_method", json!("greedy"))), "\"greedy\" is not \"noaux_tc\""),
        (DEEPSEEK, Box::new(top("qk_rope_head_dim", json!(15))), "15 is odd, rotary needs pairs"),
        (DEEPSEEK, Box::new(top("topk_group", json!(3))), "key groups per token: 3 is not between 1 and 2"),
        (DEEPSEEK, Box::new(top("routed_scaling_factor", json!(-1.0))), "-1 is not a positive number"),
        (DEEPSEEK, Box::new(top("rope_scaling", json!({ "type": "yarn" }))), "rope type"),
    ] {
        let error = configured(folder, edit).unwrap_err();
        assert!(error.contains(reason), "{error}: should say {reason}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(400) })]

    /// Whatever a number of the configuration is, there is an answer.
    #[test]
    fn any_number_in_a_configuration_is_answered(
        kimi: bool, inner: bool, which: prop::sample::Index,
        number in prop_oneof![0_u64..10, any::<u64>(), Just(1 << 20), Just(u64::from(u32::MAX)), Just(1 << 62)],
    ) {
        let folder = if kimi { KIMI } else { DEEPSEEK };
        let _answered = configured(folder, |config| {
            let map = match config.get_mut("linear_attn_config").filter(|_| inner) {
                Some(inner) => inner.as_object_mut().unwrap(),
                None => config,
            };
            let key = map.keys().nth(which.index(map.len())).unwrap().clone();
            map.insert(key, number.into());
        });
    }
}
