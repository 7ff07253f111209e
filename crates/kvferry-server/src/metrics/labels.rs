//! Labels, and the bound on those whose values come from outside.

use std::{
    collections::BTreeSet,
    sync::{Mutex, PoisonError},
};

use prometheus_client::encoding::EncodeLabelSet;

/// Longest value of a label that comes from outside.
const LONGEST: usize = 64;

/// Values of a label that comes from outside, such as the names of peers: the first few have a series each, all others
/// share `other`, so that nobody can make a process count without end.
#[derive(Debug)]
pub(crate) struct Bounded {
    known: Mutex<BTreeSet<String>>,
    most: usize,
}

impl Bounded {
    /// What all others share.
    pub(crate) const OTHER: &'static str = "other";

    pub(crate) fn new(most: usize) -> Self {
        Self { known: Mutex::default(), most }
    }

    /// The value to count under.
    pub(crate) fn label(&self, value: &str) -> String {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if known.contains(value) {
            return value.to_owned();
        }
        if value.is_empty() || value.len() > LONGEST || known.len() >= self.most {
            return Self::OTHER.to_owned();
        }
        known.insert(value.to_owned());
        value.to_owned()
    }
}

/// A stage of a room.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct StageLabels {
    pub(crate) stage: &'static str,
}

/// How a room ended.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct OutcomeLabels {
    pub(crate) outcome: &'static str,
}

/// Why a room failed, and with whom.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct FailureLabels {
    pub(crate) blame: &'static str,
    pub(crate) stage: &'static str,
    pub(crate) cause: &'static str,
    pub(crate) peer: String,
}

/// In which field two instances differ.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct RefusalLabels {
    pub(crate) field: String,
    pub(crate) peer: String,
}

/// What went to or came from whom.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct PeerLabels {
    pub(crate) direction: &'static str,
    pub(crate) peer: String,
    pub(crate) transport: &'static str,
}

/// Over what there is no way to whom.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct LinkLabels {
    pub(crate) transport: &'static str,
    pub(crate) peer: String,
}

/// A state that several things are in.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct StateLabels {
    pub(crate) state: &'static str,
}

/// One of several kinds of a thing.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct KindLabels {
    pub(crate) kind: &'static str,
}

/// What runs.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct BuildLabels {
    pub(crate) version: &'static str,
    pub(crate) role: String,
    pub(crate) instance: String,
    pub(crate) model: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_from_outside_are_counted_apart_up_to_a_bound() {
        let names = Bounded::new(3);
        for n in 0..100 {
            names.label(&format!("peer-{n}"));
        }
        let told: Vec<_> = (0..5).map(|n| names.label(&format!("peer-{n}"))).collect();
        assert_eq!(told, ["peer-0", "peer-1", "peer-2", "other", "other"]);
        let fresh = Bounded::new(3);
        assert_eq!((fresh.label(""), fresh.label(&"x".repeat(65))), ("other".into(), "other".into()));
        assert_eq!(fresh.label(&"x".repeat(64)).len(), 64);
    }
}
