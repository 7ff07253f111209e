//! What the person at the terminal sees while a demo runs; nothing with `--json`.

use indicatif::ProgressBar;
use kvferry_engine::tokenizer::{Detokenizer, Tokenizer};

use super::{
    cluster::{Cluster, Over},
    prompts::Prompt,
};
use crate::{
    args::{DemoArgs, name_of},
    model::Progress,
    terminal::{self, Look, styled},
};

/// Columns of a name in front of what it names, and of a whole line.
const NAME: usize = 15;
const LINE: usize = terminal::WIDTH;

/// Speaks, or is silent.
#[derive(Clone)]
pub(super) struct Show {
    progress: Progress,
    tokenizer: Option<Tokenizer>,
}

impl Show {
    pub(super) fn new(progress: Progress, tokenizer: Option<Tokenizer>) -> Self {
        Self { progress, tokenizer }
    }

    fn silent(&self) -> bool {
        self.progress == Progress::Quiet
    }

    /// What is going to be run.
    pub(super) fn title(&self, model: &str, attention: &str, args: &DemoArgs) {
        let facts = format!("{model}  {attention}, {}, {} cache", name_of(&args.engine.arith), kv_name(args));
        self.paragraph("model").all(&facts);
    }

    /// The processes.
    pub(super) fn cluster(&self, cluster: &Cluster) {
        for (name, text) in cluster.describe() {
            self.paragraph(name).all(&text);
        }
    }

    /// What moved the cache, where that is not what was announced.
    pub(super) fn moved_over(&self, over: &Over) {
        if !self.silent() {
            terminal::line("");
        }
        self.paragraph("moved over").all(&over.to_string());
    }

    /// A prompt that is going to be answered.
    pub(super) fn prompt(&self, prompt: &Prompt) {
        if !self.silent() {
            terminal::line("");
        }
        self.paragraph("prompt").all(&prompt.label);
    }

    /// An answer that is going to come.
    pub(super) fn answer(&self, who: &'static str) -> Answering {
        Answering {
            paragraph: self.paragraph(who),
            text: self.tokenizer.as_ref().map(Tokenizer::detokenizer),
            waiting: self.progress.spinner(&format!("{who}: the prompt is being computed")),
        }
    }

    fn paragraph(&self, name: &'static str) -> Paragraph {
        Paragraph { silent: self.silent(), name, column: 0 }
    }
}

/// The element types of the cache, as far as they agree.
fn kv_name(args: &DemoArgs) -> String {
    let (prefill, decode) = args.dtypes();
    if prefill == decode { decode.to_string() } else { format!("{prefill} to {decode}") }
}

/// Text with its name on the left, wrapped at spaces.
struct Paragraph {
    silent: bool,
    name: &'static str,
    column: usize,
}

impl Paragraph {
    /// Writes a piece; one that begins with a space may begin a line instead.
    fn push(&mut self, piece: &str) {
        if self.silent || piece.is_empty() {
            return;
        }
        // Answers stay one paragraph each, so that two can be compared by eye.
        let piece = piece.replace(['\n', '\r'], " ");
        let wide = piece.chars().count();
        if self.column == 0 {
            let name = format!("{:>NAME$}", self.name);
            terminal::piece(format_args!("{}  {}", styled(Look::Dim, name), piece.trim_start()));
            self.column = NAME + 2 + wide;
        } else if piece.starts_with(' ') && self.column + wide > LINE {
            terminal::piece(format_args!("\n{:NAME$}  {}", "", piece.trim_start()));
            self.column = NAME + 2 + wide;
        } else {
            terminal::piece(piece);
            self.column += wide;
        }
    }

    /// Writes the whole text.
    fn all(mut self, text: &str) {
        for piece in text.split_inclusive(' ').scan(false, |space, word| {
            // The space goes in front of the next word.
            let piece = format!("{}{}", if *space { " " } else { "" }, word.trim_end_matches(' '));
            *space = word.ends_with(' ');
            Some(piece)
        }) {
            self.push(&piece);
        }
        self.end();
    }

    fn end(self) {
        if self.column > 0 {
            terminal::line("");
        }
    }
}

/// One answer as it comes: text, or ids where there is no tokenizer.
pub(super) struct Answering {
    paragraph: Paragraph,
    text: Option<Detokenizer>,
    /// Until the first token.
    waiting: ProgressBar,
}

impl Answering {
    pub(super) fn push(&mut self, id: u32) {
        self.waiting.finish_and_clear();
        let piece = match &mut self.text {
            Some(text) => text.push(id),
            None => format!(" {id}"),
        };
        self.paragraph.push(&piece);
    }

    pub(super) fn end(mut self) {
        self.waiting.finish_and_clear();
        if let Some(text) = &mut self.text {
            self.paragraph.push(&text.finish());
        }
        self.paragraph.end();
    }
}
