//! GGUF against the format's own writer, and against what converters do to q and k.

use crate::writer::{FFN, Gguf, HEAD_DIM, HEADS, HIDDEN, TOKENS, tiny};
use kvferry_engine::checkpoint::{
    Arch, AttentionTensors, Checkpoint, FfnTensors, GatedTensors, GqaTensors, LayerTensors, ModelConfig,
};
use kvferry_plan::LayerId;
use safetensors::SafeTensors;

pub(crate) fn open(file: &Gguf) -> Checkpoint {
    Checkpoint::from_gguf("tiny.gguf", file.build().into()).unwrap()
}

/// The attention and the network of a layer, if they are of the plain kinds, as all are in GGUF.
fn parts(checkpoint: &Checkpoint, layer: LayerId) -> (GqaTensors, GatedTensors) {
    let layer = checkpoint.layer(layer).unwrap();
    let attention = match layer.attention {
        AttentionTensors::Gqa(attention) => Some(attention),
        _ => None,
    };
    let ffn = match layer.ffn {
        FfnTensors::Dense(ffn) => Some(ffn),
        FfnTensors::Moe(_) => None,
    };
    (attention.unwrap(), ffn.unwrap())
}

/// All of `data/quants`: eleven element types, written and dequantised by the format's own Python package.
#[test]
fn every_element_type_equals_the_reference_bit_for_bit() {
    let checkpoint = Checkpoint::open("tests/data/quants/model.gguf".as_ref()).unwrap();
    let expected = std::fs::read("tests/data/quants/expected.safetensors").unwrap();
    let expected = SafeTensors::deserialize(&expected).unwrap();
    let LayerTensors { attn_norm, ffn_norm, .. } = checkpoint.layer(LayerId(0)).unwrap();
    let (attention, GatedTensors { gate, up, down }) = parts(&checkpoint, LayerId(0));
    let GqaTensors { q, k, v, q_bias, k_bias, v_bias, o } = attention;
    assert_eq!((q_bias, k_bias, v_bias), (None, None, None));
    let local = |name: &str| format!("model.layers.0.{name}.weight");
    let all = [
        ("model.embed_tokens.weight".to_owned(), checkpoint.embedding().unwrap()),
        ("model.norm.weight".to_owned(), checkpoint.final_norm().unwrap()),
        ("lm_head.weight".to_owned(), checkpoint.head().unwrap().unwrap()),
        (local("input_layernorm"), attn_norm),
        (local("post_attention_layernorm"), ffn_norm),
        (local("self_attn.q_proj"), q),
        (local("self_attn.k_proj"), k),
        (local("self_attn.v_proj"), v),
        (local("self_attn.o_proj"), o),
        (local("mlp.gate_proj"), gate),
        (local("mlp.up_proj"), up),
        (local("mlp.down_proj"), down),
    ];
    assert_eq!(all.len(), expected.len());
    for (name, values) in all {
        let want = expected.tensor(&name).unwrap();
        let bits: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        assert!(bits == want.data(), "{name} differs");
    }
}

#[test]
fn metadata_becomes_the_configuration() {
    let checkpoint = Checkpoint::open("tests/data/quants/model.gguf".as_ref()).unwrap();
    let want = ModelConfig {
        arch: Arch::Llama,
        layers: 1,
        hidden: 256,
        heads: 2,
        kv_heads: 1,
        head_dim: 16,
        ffn: 32,
        vocab: 16,
        rope_theta: 500_000.0,
        rms_eps: 1e-5,
        max_position: 64,
        bos: None,
        eos: vec![],
        tie_embeddings: false,
        qkv_bias: false,
        rope_pairs: true,
        mla: None,
        kda: None,
        moe: None,
        draft_layers: 0,
    };
    assert_eq!(*checkpoint.config(), want);
    assert_eq!(checkpoint.name(), "model");
    let tiny = open(&tiny("llama"));
    assert_eq!((tiny.config().bos, tiny.config().eos.as_slice()), (Some(1), [0].as_slice()));
    assert!(tiny.config().tie_embeddings && tiny.config().qkv_bias);
    assert!(tiny.head().unwrap().is_none());
}

/// Converters write `llama` heads as pairs and leave `qwen2` heads alone; weights and biases alike.
#[test]
fn only_llama_rows_are_put_back_into_halves() {
    let first =
        |rows: &[f32]| rows.chunks_exact(HIDDEN).map(|row| row[0] as usize / HIDDEN).collect::<Vec<_>>();
    let whole =
        |bias: Option<Vec<f32>>| bias.unwrap().iter().map(|value| *value as usize).collect::<Vec<_>>();
    for (arch, q, k) in [
        ("llama", vec![0, 2, 1, 3, 4, 6, 5, 7], vec![0, 2, 1, 3]),
        ("qwen2", (0..HEADS * HEAD_DIM).collect(), (0..HEAD_DIM).collect()),
    ] {
        let (layer, ffn) = parts(&open(&tiny(arch)), LayerId(1));
        assert_eq!(first(&layer.q), q, "{arch}");
        assert_eq!(first(&layer.k), k, "{arch}");
        assert_eq!(first(&layer.v), [0, 1, 2, 3], "{arch}");
        assert_eq!(whole(layer.q_bias), q, "{arch}");
        assert_eq!(whole(layer.k_bias), k, "{arch}");
        assert_eq!(whole(layer.v_bias), [0, 1, 2, 3], "{arch}");
        assert_eq!((ffn.gate.len(), ffn.down.len()), (FFN * HIDDEN, HIDDEN * FFN));
    }
}

#[test]
fn an_untied_head_is_read() {
    let mut file = tiny("llama");
    let head: Vec<f32> = (0..TOKENS.len() * HIDDEN).map(|i| -(i as f32)).collect();
    file.tensor("output.weight", &[TOKENS.len() as u64, HIDDEN as u64], &head);
    assert_eq!(open(&file).head().unwrap(), Some(head));
}

#[test]
fn the_digest_is_that_of_the_file() {
    // SHA-256 of the file by sha256sum.
    let checkpoint = Checkpoint::open("tests/data/quants/model.gguf".as_ref()).unwrap();
    assert_eq!(checkpoint.digest(), include_str!("../data/quants/model.gguf.sha256").trim());
}
