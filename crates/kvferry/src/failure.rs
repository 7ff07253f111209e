//! An error on its way to the person at the terminal.

use std::{fmt, process::ExitCode};

use kvferry_plan::Blame;

/// A message that says what happened and what would work, and who can do something about it.
#[derive(Debug)]
pub(crate) struct Failure {
    blame: Blame,
    text: String,
}

impl Failure {
    pub(crate) fn new(blame: Blame, text: impl fmt::Display) -> Self {
        Self { blame, text: text.to_string() }
    }

    pub(crate) fn caller(text: impl fmt::Display) -> Self {
        Self::new(Blame::Caller, text)
    }

    pub(crate) fn blame(&self) -> Blame {
        self.blame
    }

    /// Puts what was being done in front.
    pub(crate) fn within(self, what: impl fmt::Display) -> Self {
        Self { text: format!("{what}: {}", self.text), ..self }
    }

    /// 2 when the command has to be changed, 1 for everything else.
    pub(crate) fn exit_code(&self) -> ExitCode {
        ExitCode::from(if self.blame == Blame::Caller { 2 } else { 1 })
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

macro_rules! blamed {
    ($($error:ty),* $(,)?) => {
        $(impl From<$error> for Failure {
            fn from(error: $error) -> Self {
                Self::new(error.blame(), error)
            }
        })*
    };
}

blamed!(
    kvferry_arena::ArenaError,
    kvferry_engine::EngineError,
    kvferry_engine::checkpoint::LoadError,
    kvferry_registry::BindError,
    kvferry_registry::ClientError,
    kvferry_plan::Unsupported,
    kvferry_transport::TransportError,
);
