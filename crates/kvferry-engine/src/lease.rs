//! Who may free a request's pages: whoever holds its lease, and nobody else.

use kvferry_plan::{PageTable, RoomKey, SlotId};

use crate::{
    mailbox::Sender,
    scheduler::{Command, JobId},
};

/// The ownership of one request's pages, as [`crate::Engine::prefill`] and [`crate::Engine::reserve`] give it. Dropping
/// it ends the request, whatever its state, and frees the pages: keep it until no other process reads or writes them
/// any more.
///
/// It names this one request and not its key, so nobody who merely knows the key (a duplicate of the request, say)
/// can end it.
#[derive(Debug)]
pub struct RoomLease {
    key: RoomKey,
    id: JobId,
    table: PageTable,
    slot: Option<SlotId>,
    cached: u64,
    commands: Sender<Command>,
}

impl RoomLease {
    pub(crate) fn new(
        (key, id): (RoomKey, JobId),
        table: PageTable,
        slot: Option<SlotId>,
        cached: u64,
        commands: Sender<Command>,
    ) -> Self {
        Self { key, id, table, slot, cached, commands }
    }

    pub(crate) fn id(&self) -> JobId {
        self.id
    }

    /// The room.
    #[must_use]
    pub fn key(&self) -> RoomKey {
        self.key
    }

    /// The pages, the same on every rank.
    #[must_use]
    pub fn table(&self) -> &PageTable {
        &self.table
    }

    /// The slot of the request's state, the same on every rank; `None` in a model without such state.
    #[must_use]
    pub fn slot(&self) -> Option<SlotId> {
        self.slot
    }

    /// Tokens at the beginning of the prompt whose cache lies in the pages already, fewer than the prompt has. Other
    /// requests may read these pages too: only what comes after them is to be written.
    #[must_use]
    pub fn cached(&self) -> u64 {
        self.cached
    }

    /// Says before anything is in the pages that what will be is not for later requests.
    pub fn set_apart(&self) {
        // An engine that has stopped has no later requests.
        let _ = self.commands.send(Command::SetApart { id: self.id });
    }
}

impl Drop for RoomLease {
    fn drop(&mut self) {
        // A task that panics has not waited for whoever writes into the pages: they stay taken.
        if !std::thread::panicking() {
            // An engine that has stopped holds no pages.
            let _ = self.commands.send(Command::Return { id: self.id });
        }
    }
}
