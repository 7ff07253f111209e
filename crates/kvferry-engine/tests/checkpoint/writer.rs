//! A small GGUF writer that writes whatever it is told.

/// A GGUF file in the making.
#[derive(Clone)]
pub(crate) struct Gguf {
    pub(crate) version: u32,
    /// Name, type code, encoded value.
    pub(crate) keys: Vec<(String, u32, Vec<u8>)>,
    pub(crate) tensors: Vec<Tensor>,
    /// Written instead of the true numbers of tensors and keys.
    pub(crate) counts: Option<(u64, u64)>,
}

/// One tensor; `offset` is written instead of the true one.
#[derive(Clone)]
pub(crate) struct Tensor {
    pub(crate) name: String,
    /// Outermost axis first.
    pub(crate) shape: Vec<u64>,
    pub(crate) kind: u32,
    pub(crate) data: Vec<u8>,
    pub(crate) offset: Option<u64>,
}

fn text(value: &str) -> Vec<u8> {
    [&(value.len() as u64).to_le_bytes(), value.as_bytes()].concat()
}

impl Gguf {
    pub(crate) fn new() -> Self {
        Self { version: 3, keys: Vec::new(), tensors: Vec::new(), counts: None }
    }

    pub(crate) fn raw(&mut self, key: &str, kind: u32, value: Vec<u8>) -> &mut Self {
        self.keys.retain(|(name, ..)| name != key);
        self.keys.push((key.to_owned(), kind, value));
        self
    }

    pub(crate) fn text(&mut self, key: &str, value: &str) -> &mut Self {
        self.raw(key, 8, text(value))
    }

    pub(crate) fn number(&mut self, key: &str, value: u32) -> &mut Self {
        self.raw(key, 4, value.to_le_bytes().to_vec())
    }

    pub(crate) fn real(&mut self, key: &str, value: f32) -> &mut Self {
        self.raw(key, 6, value.to_le_bytes().to_vec())
    }

    pub(crate) fn flag(&mut self, key: &str, value: bool) -> &mut Self {
        self.raw(key, 7, vec![u8::from(value)])
    }

    pub(crate) fn texts(&mut self, key: &str, values: &[&str]) -> &mut Self {
        let mut list = [8u32.to_le_bytes().as_slice(), &(values.len() as u64).to_le_bytes()].concat();
        list.extend(values.iter().flat_map(|value| text(value)));
        self.raw(key, 9, list)
    }

    pub(crate) fn integers(&mut self, key: &str, values: &[i32]) -> &mut Self {
        let mut list = [5u32.to_le_bytes().as_slice(), &(values.len() as u64).to_le_bytes()].concat();
        list.extend(values.iter().flat_map(|value| value.to_le_bytes()));
        self.raw(key, 9, list)
    }

    pub(crate) fn tensor(&mut self, name: &str, shape: &[u64], values: &[f32]) -> &mut Self {
        assert_eq!(shape.iter().product::<u64>(), values.len() as u64, "{name}");
        let data = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let tensor = Tensor { name: name.to_owned(), shape: shape.to_vec(), kind: 0, data, offset: None };
        self.tensors.push(tensor);
        self
    }

    pub(crate) fn tensor_mut(&mut self, name: &str) -> &mut Tensor {
        self.tensors.iter_mut().find(|tensor| tensor.name == name).unwrap()
    }

    pub(crate) fn without(&self, key: &str) -> Self {
        let mut file = self.clone();
        file.keys.retain(|(name, ..)| name != key);
        file.tensors.retain(|tensor| tensor.name != key);
        file
    }

    pub(crate) fn build(&self) -> Vec<u8> {
        let counts = self.counts.unwrap_or((self.tensors.len() as u64, self.keys.len() as u64));
        let mut file = b"GGUF".to_vec();
        file.extend(self.version.to_le_bytes());
        file.extend(counts.0.to_le_bytes());
        file.extend(counts.1.to_le_bytes());
        for (name, kind, value) in &self.keys {
            file.extend(text(name));
            file.extend(kind.to_le_bytes());
            file.extend(value);
        }
        let mut data = Vec::new();
        for tensor in &self.tensors {
            file.extend(text(&tensor.name));
            file.extend((tensor.shape.len() as u32).to_le_bytes());
            file.extend(tensor.shape.iter().rev().flat_map(|size| size.to_le_bytes()));
            file.extend(tensor.kind.to_le_bytes());
            file.extend(tensor.offset.unwrap_or(data.len() as u64).to_le_bytes());
            data.extend(&tensor.data);
            data.resize(data.len().next_multiple_of(32), 0);
        }
        file.resize(file.len().next_multiple_of(32), 0);
        file.extend(data);
        file
    }
}

/// The geometry of [`tiny`].
pub(crate) const HIDDEN: usize = 8;
pub(crate) const HEADS: usize = 2;
pub(crate) const KV_HEADS: usize = 1;
pub(crate) const HEAD_DIM: usize = 4;
pub(crate) const FFN: usize = 12;

/// The tokens of [`tiny`], as they are written in byte-level BPE (`Ġ` is a space).
pub(crate) const TOKENS: [&str; 12] =
    ["<|end|>", "<|begin|>", "a", "b", "Ġ", "ab", "Ġab", "â", "Ĩ", "Ĵ", "1", "<tool>"];

/// A valid two-layer model of a few kilobytes with a tokenizer and a chat template. Weight `i` of a tensor is
/// `i`, so that rows tell where they came from.
pub(crate) fn tiny(arch: &str) -> Gguf {
    let mut file = Gguf::new();
    let key = |suffix: &str| format!("{arch}.{suffix}");
    file.text("general.architecture", arch)
        .number(&key("block_count"), 2)
        .number(&key("context_length"), 64)
        .number(&key("embedding_length"), HIDDEN as u32)
        .number(&key("feed_forward_length"), FFN as u32)
        .number(&key("attention.head_count"), HEADS as u32)
        .number(&key("attention.head_count_kv"), KV_HEADS as u32)
        .real(&key("attention.layer_norm_rms_epsilon"), 1e-5)
        .real(&key("rope.freq_base"), 1e4)
        .text("tokenizer.ggml.model", "gpt2")
        .text("tokenizer.ggml.pre", "smollm")
        .texts("tokenizer.ggml.tokens", &TOKENS)
        .integers("tokenizer.ggml.token_type", &[3, 3, 1, 1, 1, 1, 1, 1, 1, 1, 1, 4])
        .texts("tokenizer.ggml.merges", &["a b", "Ġ ab"])
        .number("tokenizer.ggml.bos_token_id", 1)
        .number("tokenizer.ggml.eos_token_id", 0)
        .flag("tokenizer.ggml.add_bos_token", true)
        .text(
            "tokenizer.chat_template",
            "{% for m in messages %}{{ m['role'] + ':' + m['content'].strip() + eos_token }}{% endfor %}\
             {% if add_generation_prompt %}{{ bos_token }}{% endif %}",
        );
    let mut add = |name: &str, shape: &[usize]| {
        let count = shape.iter().product::<usize>();
        let shape: Vec<u64> = shape.iter().map(|size| *size as u64).collect();
        file.tensor(name, &shape, &(0..count).map(|i| i as f32).collect::<Vec<_>>());
    };
    let (q, kv) = (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM);
    add("token_embd.weight", &[TOKENS.len(), HIDDEN]);
    add("output_norm.weight", &[HIDDEN]);
    for layer in 0..2 {
        let name = |suffix: &str| format!("blk.{layer}.{suffix}");
        add(&name("attn_norm.weight"), &[HIDDEN]);
        add(&name("ffn_norm.weight"), &[HIDDEN]);
        add(&name("attn_q.weight"), &[q, HIDDEN]);
        add(&name("attn_k.weight"), &[kv, HIDDEN]);
        add(&name("attn_v.weight"), &[kv, HIDDEN]);
        add(&name("attn_q.bias"), &[q]);
        add(&name("attn_k.bias"), &[kv]);
        add(&name("attn_v.bias"), &[kv]);
        add(&name("attn_output.weight"), &[HIDDEN, q]);
        add(&name("ffn_gate.weight"), &[FFN, HIDDEN]);
        add(&name("ffn_up.weight"), &[FFN, HIDDEN]);
        add(&name("ffn_down.weight"), &[HIDDEN, FFN]);
    }
    file
}
