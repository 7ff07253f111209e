//! The memory in which a rank works, used again from step to step. In a step of fixed shape it may not grow: all of it
//! was taken when the shapes were captured.

use std::{cell::Cell, mem::size_of};

use super::{attend, ffn, gqa, kda, mla, rank::OwnRow};
use crate::{
    EngineError, Model,
    math::{AttentionSums, KeyPanels, Partial, Scores, ValueRows},
    pool::{Narrow, RowBuffer},
    profile::Clock,
};

/// What tells how much memory it has.
pub(super) trait Memory {
    /// Bytes.
    fn bytes(&self) -> usize;
}

impl<T> Memory for Vec<T> {
    fn bytes(&self) -> usize {
        self.capacity() * size_of::<T>()
    }
}

macro_rules! memory {
    ($($name:ty),*) => {
        $(impl Memory for $name {
            fn bytes(&self) -> usize {
                <$name>::bytes(self)
            }
        })*
    };
}
memory!(AttentionSums, KeyPanels, Narrow, Partial, RowBuffer, Scores, ValueRows);

/// Keeps account of what a rank's memory has grown by, whether it may grow, and where its time goes.
#[derive(Debug, Default)]
pub(super) struct Account {
    pub(super) clock: Clock,
    frozen: Cell<bool>,
    bytes: Cell<usize>,
}

impl Account {
    /// Whether memory may not grow from now on.
    pub(super) fn freeze(&self, frozen: bool) {
        self.frozen.set(frozen);
    }

    /// Bytes taken so far.
    pub(super) fn bytes(&self) -> usize {
        self.bytes.get()
    }

    fn refuse(&self, wanted: usize, held: usize) -> Result<(), EngineError> {
        if self.frozen.get() && wanted > held {
            return Err(EngineError::Captured { wanted, held });
        }
        Ok(())
    }

    /// Lets `with` use memory, and notes by how much that grew.
    ///
    /// # Errors
    /// [`EngineError::Captured`] when it should not have.
    pub(super) fn note<M: Memory, T>(
        &self,
        memory: &mut M,
        with: impl FnOnce(&mut M) -> T,
    ) -> Result<T, EngineError> {
        let before = memory.bytes();
        let done = with(memory);
        let after = memory.bytes();
        self.bytes.set(self.bytes.get() + after.saturating_sub(before));
        self.refuse(after, before).map(|()| done)
    }

    /// An empty list that can take `len` elements without growing.
    ///
    /// # Errors
    /// As [`Account::zeroed`].
    pub(super) fn cleared<'v, T>(
        &self,
        list: &'v mut Vec<T>,
        len: usize,
    ) -> Result<&'v mut Vec<T>, EngineError> {
        list.clear();
        self.refuse(len * size_of::<T>(), list.bytes())?;
        self.note(list, |list| list.reserve_exact(len))?;
        Ok(list)
    }

    /// `len` zeros.
    ///
    /// # Errors
    /// [`EngineError::Captured`] when memory may not grow and would have to; then it has not.
    pub(super) fn zeroed<'v, T: Copy + Default>(
        &self,
        list: &'v mut Vec<T>,
        len: usize,
    ) -> Result<&'v mut [T], EngineError> {
        let list = self.cleared(list, len)?;
        list.resize(len, T::default());
        Ok(list)
    }
}

/// All memory of a rank, and what it brings home from a step.
#[derive(Debug)]
pub(super) struct Space {
    pub(super) account: Account,
    /// The residual stream `[rows][hidden]`.
    pub(super) x: Vec<f32>,
    /// The same after a norm.
    pub(super) normed: Vec<f32>,
    /// This rank's part of what is added next.
    pub(super) partial: Partial,
    pub(super) own: OwnRows,
    pub(super) narrow: Narrow,
    pub(super) gqa: gqa::Buffers,
    pub(super) mla: mla::Buffers,
    pub(super) kda: kda::Buffers,
    pub(super) ffn: ffn::Buffers,
    pub(super) attend: attend::Buffers,
    /// Rows whose logits are wanted, and their logits in this rank's part of the vocabulary.
    pub(super) last: Vec<f32>,
    pub(super) part: Vec<f32>,
    /// Logits `[wanted rows][vocabulary]`, on the first rank of the last stage.
    pub(super) logits: Vec<f32>,
    /// Batch rows with a value out of range.
    pub(super) bad: Vec<usize>,
}

/// The rows whose tokens' cache a rank keeps.
#[derive(Debug, Default)]
pub(super) struct OwnRows {
    pub(super) rows: Vec<OwnRow>,
    /// `[rows][hidden]`, with space for all rows of the batch.
    pub(super) x: Vec<f32>,
}

impl Space {
    pub(super) fn new(model: &Model) -> Self {
        Self {
            account: Account::default(),
            x: Vec::new(),
            normed: Vec::new(),
            partial: Partial::new(model.arith(), 0, model.config().hidden),
            own: OwnRows::default(),
            narrow: Narrow::default(),
            gqa: gqa::Buffers::default(),
            mla: mla::Buffers::default(),
            kda: kda::Buffers::default(),
            ffn: ffn::Buffers::default(),
            attend: attend::Buffers::new(model.arith()),
            last: Vec::new(),
            part: Vec::new(),
            logits: Vec::new(),
            bad: Vec::new(),
        }
    }
}
