//! What can be wrong with a model file.

use kvferry_plan::{Blame, LayerId};
use std::{fmt, io};

/// The place in a model file that an error is about. Names come from the file, so they are escaped and cut.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Item {
    /// The file's own head: magic, version, counts.
    Header,
    /// A metadata or configuration key.
    Key(String),
    /// A tensor.
    Tensor(String),
}

impl Item {
    /// A metadata or configuration key.
    pub(super) fn key(name: &str) -> Self {
        Self::Key(printable(name))
    }

    /// A tensor.
    pub(super) fn tensor(name: &str) -> Self {
        Self::Tensor(printable(name))
    }
}

impl fmt::Display for Item {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Header => f.write_str("header"),
            Self::Key(name) => write!(f, "key {name}"),
            Self::Tensor(name) => write!(f, "tensor {name}"),
        }
    }
}

/// Text out of a hostile file, fit for one line of a terminal.
pub(super) fn printable(name: &str) -> String {
    const LONGEST: usize = 120;
    let mut text: String = name.escape_debug().take(LONGEST).collect();
    if name.escape_debug().nth(LONGEST).is_some() {
        text.push_str("...");
    }
    text
}

/// Why a checkpoint cannot be used. Every variant names the file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The operating system would not hand over the file.
    #[error("{file}: cannot be read: {source}; check the path and its permissions")]
    Read {
        /// The file.
        file: String,
        /// What the operating system said.
        source: io::Error,
    },
    /// The path leads to something else than a model.
    #[error("{file}: not a model: {reason}; name a GGUF file or a folder with config.json and *.safetensors")]
    NotAModel {
        /// The file or folder.
        file: String,
        /// What was found.
        reason: String,
    },
    /// The file contradicts its own format.
    #[error("{file}: {item}: {reason}; the file is damaged, fetch it again and compare its checksum")]
    Damaged {
        /// The file.
        file: String,
        /// The place.
        item: Item,
        /// The contradiction.
        reason: String,
    },
    /// Something the model cannot do without is not there.
    #[error("{file}: {item} is missing; the file is incomplete or of another architecture")]
    Missing {
        /// The file.
        file: String,
        /// What is missing.
        item: Item,
    },
    /// A tensor does not have the shape that the configuration asks for.
    #[error(
        "{file}: tensor {tensor} has shape {found:?}, its configuration asks for {wanted:?}; \
         the file is damaged or mixes two models"
    )]
    Shape {
        /// The file.
        file: String,
        /// The tensor.
        tensor: String,
        /// Rows, then columns, as stored.
        found: Vec<u64>,
        /// Rows, then columns, as configured.
        wanted: Vec<u64>,
    },
    /// The file is sound, but this engine has no such model.
    #[error(
        "{file}: {item}: {reason}; use a llama, qwen2, deepseek_v3 or kimi_linear model in a supported encoding"
    )]
    Unsupported {
        /// The file.
        file: String,
        /// The place.
        item: Item,
        /// What is not supported.
        reason: String,
    },
    /// The weights would not fit.
    #[error(
        "{file}: its weights need {} of memory as f32, {} are available; \
         use a smaller model or a machine with more memory",
        gib(*.needs),
        gib(*.available)
    )]
    TooLarge {
        /// The file.
        file: String,
        /// Bytes of the weights once loaded.
        needs: u64,
        /// Bytes that can be had.
        available: u64,
    },
    /// A layer was asked for that the model does not have.
    #[error("{file}: layer {layer} does not exist, the model has {layers} layers; ask for a smaller one")]
    NoSuchLayer {
        /// The file.
        file: String,
        /// The layer asked for.
        layer: LayerId,
        /// Layers of the model.
        layers: usize,
    },
}

/// Bytes for people, in one unit so that two of them compare at a glance.
fn gib(bytes: u64) -> String {
    // A tenth of a GiB, rounded up.
    let tenths = bytes.saturating_mul(10).div_ceil(1 << 30);
    format!("{}.{} GiB", tenths / 10, tenths % 10)
}

impl LoadError {
    /// Who can do something about it: the machine that holds the file, or the caller who chose it.
    ///
    /// ```
    /// use kvferry_engine::checkpoint::Checkpoint;
    /// use kvferry_plan::Blame;
    /// let error = Checkpoint::open("/no/such/model.gguf".as_ref()).unwrap_err();
    /// assert_eq!(error.blame(), Blame::Environment);
    /// assert!(error.to_string().starts_with("/no/such/model.gguf: cannot be read"));
    /// ```
    #[must_use]
    pub fn blame(&self) -> Blame {
        match self {
            Self::Read { .. } | Self::Damaged { .. } | Self::Missing { .. } | Self::Shape { .. } => {
                Blame::Environment
            }
            Self::TooLarge { .. } => Blame::Environment,
            Self::NotAModel { .. } | Self::Unsupported { .. } | Self::NoSuchLayer { .. } => Blame::Caller,
        }
    }

    pub(super) fn damaged(file: &str, item: Item, reason: impl Into<String>) -> Self {
        Self::Damaged { file: file.to_owned(), item, reason: reason.into() }
    }

    pub(super) fn unsupported(file: &str, item: Item, reason: impl Into<String>) -> Self {
        Self::Unsupported { file: file.to_owned(), item, reason: reason.into() }
    }

    pub(super) fn missing(file: &str, item: Item) -> Self {
        Self::Missing { file: file.to_owned(), item }
    }
}
