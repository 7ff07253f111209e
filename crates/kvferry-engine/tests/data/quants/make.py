"""Makes model.gguf (every supported element type, written by the format's own Python package) and
expected.safetensors (the same weights as that package dequantises them, under Hugging Face names, q and k in
rotate-half order). Needs: pip install gguf safetensors numpy. Deterministic."""

import numpy as np
from gguf import GGUFWriter, GGMLQuantizationType as Q, dequantize, quantize
from safetensors.numpy import save_file

rng = np.random.default_rng(7)
HIDDEN, HEADS, KV_HEADS, HEAD, FFN, VOCAB = 256, 2, 1, 16, 32, 16

writer = GGUFWriter("model.gguf", "llama")
writer.add_block_count(1)
writer.add_context_length(64)
writer.add_embedding_length(HIDDEN)
writer.add_feed_forward_length(FFN)
writer.add_head_count(HEADS)
writer.add_head_count_kv(KV_HEADS)
writer.add_layer_norm_rms_eps(1e-5)
writer.add_rope_freq_base(500000.0)
writer.add_key_length(HEAD)
writer.add_value_length(HEAD)
expected = {}


def k_blocks(rows, kind, size, scales):
    """Random K-blocks; the half-precision scales at the given offsets stay small and finite."""
    blocks = rng.integers(0, 256, (rows * HIDDEN // 256, size), dtype=np.uint8)
    for at in scales:
        scale = rng.normal(0, 0.01, len(blocks)).astype(np.float16)
        blocks[:, at : at + 2] = scale.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(rows, -1)


def add(gguf_name, hf_name, shape, kind, heads=None):
    layouts = {Q.Q4_K: (144, (0, 2)), Q.Q5_K: (176, (0, 2)), Q.Q6_K: (210, (208,))}
    if kind in layouts:
        data = k_blocks(shape[0], kind, *layouts[kind])
    else:
        data = quantize(rng.normal(0, 0.5, shape).astype(np.float32), kind)
    writer.add_tensor(gguf_name, data, raw_dtype=kind)
    values = dequantize(data, kind).astype(np.float32).reshape(shape)
    if heads:
        half = shape[0] // heads // 2
        values = values.reshape(heads, half, 2, shape[1]).swapaxes(1, 2).reshape(shape)
    expected[hf_name] = np.ascontiguousarray(values)


layer = "model.layers.0."
add("token_embd.weight", "model.embed_tokens.weight", (VOCAB, HIDDEN), Q.Q8_0)
add("output.weight", "lm_head.weight", (VOCAB, HIDDEN), Q.F16)
add("output_norm.weight", "model.norm.weight", (HIDDEN,), Q.BF16)
add("blk.0.attn_norm.weight", layer + "input_layernorm.weight", (HIDDEN,), Q.F32)
add("blk.0.ffn_norm.weight", layer + "post_attention_layernorm.weight", (HIDDEN,), Q.F32)
add("blk.0.attn_q.weight", layer + "self_attn.q_proj.weight", (HEADS * HEAD, HIDDEN), Q.Q4_K, HEADS)
add("blk.0.attn_k.weight", layer + "self_attn.k_proj.weight", (KV_HEADS * HEAD, HIDDEN), Q.Q5_K, KV_HEADS)
add("blk.0.attn_v.weight", layer + "self_attn.v_proj.weight", (KV_HEADS * HEAD, HIDDEN), Q.Q6_K)
add("blk.0.attn_output.weight", layer + "self_attn.o_proj.weight", (HIDDEN, HEADS * HEAD), Q.Q5_0)
add("blk.0.ffn_gate.weight", layer + "mlp.gate_proj.weight", (FFN, HIDDEN), Q.Q4_0)
add("blk.0.ffn_up.weight", layer + "mlp.up_proj.weight", (FFN, HIDDEN), Q.Q5_1)
add("blk.0.ffn_down.weight", layer + "mlp.down_proj.weight", (HIDDEN, FFN), Q.Q4_1)
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
save_file(expected, "expected.safetensors")
