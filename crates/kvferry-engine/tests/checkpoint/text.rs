//! Tokenizers and chat templates of checkpoints.

use crate::{
    gguf::open,
    writer::{HIDDEN, TOKENS, tiny},
};
use kvferry_engine::{
    chat::{ChatError, ChatTemplate, Message},
    checkpoint::Checkpoint,
    tokenizer::{Tokenizer, TokenizerError},
};
use proptest::prelude::*;
use serde_json::json;
use std::{fs, path::Path};

fn tokenizer() -> Tokenizer {
    open(&tiny("llama")).tokenizer().unwrap().unwrap()
}

#[test]
fn byte_level_bpe_from_metadata() {
    let tokenizer = tokenizer();
    // Merges in order; a digit stands alone; control and verbatim tokens are found in the text.
    assert_eq!(tokenizer.encode("ab ab1a", false).unwrap(), [5, 6, 10, 2]);
    assert_eq!(tokenizer.encode("a<|end|>b<tool>", false).unwrap(), [2, 0, 3, 11]);
    assert_eq!(tokenizer.encode("→", false).unwrap(), [7, 8, 9]);
    assert_eq!(tokenizer.encode("a", true).unwrap(), [1, 2], "the beginning is added on request");
    assert_eq!(tokenizer.encode("", false).unwrap(), [0u32; 0]);
    // A special token that is shielded is text: of its characters only those that the vocabulary has are left.
    let shielded = tokenizer.shield("a<|end|>b");
    assert!(!tokenizer.encode(&shielded, false).unwrap().contains(&0));
    let template = format!("<|end|>{}<|end|>", tokenizer.shield("a<|end|>"));
    let ids = tokenizer.encode(&template, true).unwrap();
    assert_eq!((&ids[..2], ids.iter().filter(|id| **id == 0).count()), (&[1, 0][..], 2), "{ids:?}");
    assert_eq!(tokenizer.shield("ab <tool>"), "ab <tool>");
    // Control tokens do not show, verbatim ones do, unknown ids are left out.
    assert_eq!(tokenizer.decode(&[1, 6, 11, 7, 8, 9, 99_999, 0]), " ab<tool>→");
    let mut file = tiny("llama");
    file.flag("tokenizer.ggml.add_bos_token", false);
    assert_eq!(open(&file).tokenizer().unwrap().unwrap().encode("a", true).unwrap(), [2]);
}

#[test]
fn a_token_has_its_bytes_even_when_they_are_no_character() {
    let tokenizer = tokenizer();
    let bytes = |ids: &[u32]| ids.iter().map(|id| tokenizer.token_bytes(*id).unwrap()).collect::<Vec<_>>();
    assert_eq!(bytes(&[7, 8, 9]).concat(), "→".as_bytes());
    assert!(bytes(&[7, 8, 9]).iter().all(|bytes| bytes.len() == 1));
    assert_eq!(bytes(&[6, 0, 11]), [&b" ab"[..], b"<|end|>", b"<tool>"]);
    assert_eq!(tokenizer.token_bytes(99_999), None);
}

#[test]
fn qwen2_keeps_digits_single_and_composes() {
    let mut file = tiny("qwen2");
    file.text("tokenizer.ggml.pre", "qwen2");
    let mut tokens = TOKENS;
    // `é` is two bytes; the text has it as a letter and a combining accent.
    (tokens[7], tokens[8], tokens[9]) = ("Ã", "©", "Ã©");
    file.texts("tokenizer.ggml.tokens", &tokens).texts("tokenizer.ggml.merges", &["Ã ©", "a b", "Ġ ab"]);
    let tokenizer = open(&file).tokenizer().unwrap().unwrap();
    assert_eq!(tokenizer.encode("ab ab11 e\u{301}", false).unwrap(), [5, 6, 10, 10, 4, 9]);
}

/// Kimi's folders have ranks of bytes instead of a `tokenizer.json`.
#[test]
fn a_tiktoken_vocabulary_is_merged_by_rank() {
    let folder = tempfile::tempdir().unwrap();
    for file in ["config.json", "model.safetensors"] {
        fs::copy(Path::new("tests/data/kimi_linear_tiny").join(file), folder.path().join(file)).unwrap();
    }
    // All bytes, then tokens: `he`, `ll`, `hell`, `llo`, `hello`, ` hello`, `12`, `123`, and the two Han characters `你好`.
    let alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let base64 = |bytes: &[u8]| -> String {
        let group = |group: &[u8]| {
            let bits = (0..3).fold(0_usize, |bits, i| bits << 8 | usize::from(*group.get(i).unwrap_or(&0)));
            (0..4)
                .map(move |i| match i <= group.len() {
                    true => alphabet.as_bytes()[bits >> (18 - 6 * i) & 63] as char,
                    false => '=',
                })
                .collect::<String>()
        };
        bytes.chunks(3).map(group).collect()
    };
    let words = ["he", "ll", "hell", "llo", "hello", " hello", "12", "123", "\u{4f60}", "\u{4f60}\u{597d}"];
    let tokens = (0..=255_u8).map(|byte| vec![byte]).chain(words.iter().map(|word| word.as_bytes().to_vec()));
    let lines: Vec<String> =
        (0..).zip(tokens).map(|(rank, token): (u32, _)| format!("{} {rank}", base64(&token))).collect();
    let write =
        |lines: &[String]| fs::write(folder.path().join("tiktoken.model"), lines.join("\n") + "\n").unwrap();
    write(&lines);
    let settings = json!({ "added_tokens_decoder": { "500": { "content": "[EOS]", "special": true } } });
    fs::write(folder.path().join("tokenizer_config.json"), settings.to_string()).unwrap();
    let open = || Checkpoint::open(folder.path()).unwrap().tokenizer();
    let tokenizer = open().unwrap().unwrap();
    let ids = |text: &str| tokenizer.encode(text, true).unwrap();
    // A space belongs to the word behind it. `hell` goes before `llo`, as it has the lower rank.
    assert_eq!(ids("hello hello"), [260, 261]);
    assert_eq!(ids("hellos xllo"), [260, u32::from(b's'), u32::from(b' '), u32::from(b'x'), 259]);
    // At most three digits make a piece; Han is a piece of its own.
    assert_eq!(ids("12312"), [263, 262]);
    // A piece that is a token is one, also where no two tokens make it.
    assert_eq!(ids("a\u{4f60}\u{597d}"), [u32::from(b'a'), 265]);
    assert_eq!(ids("he[EOS]"), [256, 500]);
    assert_eq!(tokenizer.decode(&[261, 500, 264]), " hello\u{4f60}");
    for (line, found) in
        [("aGU= 256", "the token occurs twice"), ("aGU 300", "no token"), ("eg== 512", "no token")]
    {
        write(&[&lines[..], &[line.into()]].concat());
        let error = open().unwrap_err().to_string();
        assert!(error.contains("tiktoken.model: header: line 267") && error.contains(found), "{error}");
    }
}

#[test]
fn kinds_that_are_not_known_are_served_by_ids() {
    for (key, value) in [("tokenizer.ggml.pre", "klingon"), ("tokenizer.ggml.model", "llama")] {
        let mut file = tiny("llama");
        file.text(key, value);
        assert!(open(&file).tokenizer().unwrap().is_none(), "{value}");
    }
    assert!(open(&tiny("llama").without("tokenizer.ggml.model")).tokenizer().unwrap().is_none());
}

#[test]
fn a_vocabulary_of_bytes_is_latin1() {
    let mut file = tiny("llama").without("tokenizer.ggml.model");
    let embedding = file.tensor_mut("token_embd.weight");
    (embedding.shape[0], embedding.data) = (256, vec![0; 256 * HIDDEN * 4]);
    let tokenizer = open(&file).tokenizer().unwrap().unwrap();
    assert_eq!(tokenizer.encode("aÿ\n", true).unwrap(), [97, 255, 10]);
    assert_eq!(tokenizer.decode(&[97, 255, 256, 10]), "aÿ\n");
    let error = tokenizer.encode("ab→", false).unwrap_err();
    assert!(matches!(error, TokenizerError::NotLatin1 { character: '→', at: 2 }));
}

#[test]
fn a_stream_waits_for_whole_characters() {
    let mut stream = tokenizer().detokenizer();
    let pieces: Vec<String> = [5, 7, 8, 9, 1, 6].map(|id| stream.push(id)).into();
    assert_eq!(pieces, ["ab", "", "", "→", "", " ab"]);
    assert_eq!(stream.push(7), "");
    assert_eq!(stream.finish(), "\u{fffd}");
    assert_eq!(stream.push(5), "ab", "a finished stream begins anew");
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(300) })]

    /// Any tokens, valid text or not.
    #[test]
    fn a_stream_is_its_text(ids in prop::collection::vec(0u32..14, 0..60)) {
        let tokenizer = tokenizer();
        let mut stream = tokenizer.detokenizer();
        let mut text: String = ids.iter().map(|id| stream.push(*id)).collect();
        text += &stream.finish();
        prop_assert_eq!(text, tokenizer.decode(&ids));
    }
}

fn user(content: &str) -> Message {
    Message { role: "user".to_owned(), content: content.to_owned() }
}

#[test]
fn the_template_of_the_file_formats_messages() {
    let template = open(&tiny("llama")).chat_template().unwrap().unwrap();
    let text = template.render(&[user(" a "), user("b")], true).unwrap();
    assert_eq!(text, "user:a<|end|>user:b<|end|><|begin|>");
    assert_eq!(template.render(&[user("a")], false).unwrap(), "user:a<|end|>");
    assert!(open(&tiny("llama").without("tokenizer.chat_template")).chat_template().unwrap().is_none());
}

/// Control of white space, filters and methods as model authors expect them from Python.
#[test]
fn templates_behave_as_in_python() {
    let source = "{%- set ns = namespace(found=false) %}\n{% for m in messages %}\n    \
                  {% if m.role == 'user' %}\n{{ m.content.split(':')[-1] | trim | tojson }}\n    {% endif %}\n\
                  {% endfor %}\n{% if tools %}tools{% endif %}\n";
    let template = ChatTemplate::new(source, None, None).unwrap();
    assert_eq!(template.render(&[user("x: y<z ")], false).unwrap(), "\"y\\u003cz\"\n");
}

#[test]
fn refusals_are_told_from_faults() {
    let template = |source| ChatTemplate::new(source, None, None).unwrap();
    let refusal = template("{{ raise_exception('roles must alternate') }}").render(&[], true).unwrap_err();
    assert!(matches!(&refusal, ChatError::Refused(reason) if reason == "roles must alternate"));
    let endless = "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}\
                   {% endfor %}{% endfor %}";
    assert!(matches!(template(endless).render(&[], true), Err(ChatError::Template(_))));
    assert!(matches!(template("{{ nothing.at.all }}").render(&[], true), Err(ChatError::Template(_))));
    assert!(matches!(ChatTemplate::new("{% if %}", None, None), Err(ChatError::Template(_))));
}

/// `llama_tiny` with more files.
fn folder(files: &[(&str, String)]) -> (tempfile::TempDir, Checkpoint) {
    let folder = tempfile::tempdir().unwrap();
    for file in ["config.json", "model.safetensors"] {
        fs::copy(Path::new("tests/data/llama_tiny").join(file), folder.path().join(file)).unwrap();
    }
    for (name, text) in files {
        fs::write(folder.path().join(name), text).unwrap();
    }
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    (folder, checkpoint)
}

fn tokenizer_json(merges: &serde_json::Value) -> String {
    json!({
        "version": "1.0",
        "added_tokens": [{ "id": 3, "content": "<s>", "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true }],
        "normalizer": null,
        "pre_tokenizer": { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true },
        "post_processor": null,
        "decoder": { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true },
        "model": { "type": "BPE", "vocab": { "a": 0, "b": 1, "ab": 2 }, "merges": merges },
    })
    .to_string()
}

#[test]
fn a_folder_brings_tokenizer_json() {
    let (_keep, checkpoint) = folder(&[("tokenizer.json", tokenizer_json(&json!(["a b"])))]);
    let tokenizer = checkpoint.tokenizer().unwrap().unwrap();
    assert_eq!(tokenizer.encode("<s>aba", true).unwrap(), [3, 2, 0]);
    assert_eq!(tokenizer.decode(&[3, 2, 0]), "aba");
    assert!(folder(&[]).1.tokenizer().unwrap().is_none());
}

#[test]
fn a_hostile_tokenizer_json_is_an_error() {
    // The library itself panics on the second.
    for json in ["{".to_owned(), tokenizer_json(&json!([["ab", "ab"]]))] {
        let (_keep, checkpoint) = folder(&[("tokenizer.json", json)]);
        let error = checkpoint.tokenizer().unwrap_err().to_string();
        assert!(error.contains("tokenizer.json: header: the tokenizer is not usable"), "{error}");
    }
}

#[test]
fn a_folder_brings_its_template_in_three_ways() {
    let rendered = |files: &[(&str, String)]| {
        let (_keep, checkpoint) = folder(files);
        checkpoint.chat_template().unwrap().map(|template| template.render(&[user("hi")], false).unwrap())
    };
    let settings = |template: serde_json::Value| {
        let tokens = json!({ "content": "<s>" });
        json!({ "bos_token": tokens, "eos_token": "</s>", "chat_template": template }).to_string()
    };
    let source = "{{ bos_token + messages[0].content + eos_token }}";
    let plain = settings(json!(source));
    assert_eq!(rendered(&[("tokenizer_config.json", plain)]).unwrap(), "<s>hi</s>");
    let named = json!([{ "name": "rag", "template": "x" }, { "name": "default", "template": source }]);
    assert_eq!(rendered(&[("tokenizer_config.json", settings(named))]).unwrap(), "<s>hi</s>");
    let both =
        [("tokenizer_config.json", settings(json!("old"))), ("chat_template.jinja", source.to_owned())];
    assert_eq!(rendered(&both).unwrap(), "<s>hi</s>");
    assert_eq!(rendered(&[]), None);
}
