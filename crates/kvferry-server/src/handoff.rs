//! The engine's hand-off over a node: what the scheduler thread says of a request goes to the room of the same key.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use kvferry_engine::{EngineError, FirstToken, HandOff};
use kvferry_node::SourceHandle;
use kvferry_plan::{RoomKey, TokenRange};

/// Something the engine said.
enum Said {
    Chunk(TokenRange),
    Failed(EngineError),
    Finished(FirstToken),
}

/// A room on its way. The engine may speak before the node knows the room: the page table, which the node needs, and
/// the first chunk come from the same thread, one right after the other.
#[derive(Default)]
struct Room {
    handle: Option<Arc<SourceHandle>>,
    early: Vec<Said>,
    first: Option<FirstToken>,
    failure: Option<EngineError>,
}

impl Room {
    fn say(&mut self, said: Said) {
        match &said {
            Said::Chunk(_) => {}
            Said::Failed(error) => self.failure = Some(error.clone()),
            Said::Finished(first) => self.first = Some(first.clone()),
        }
        match &self.handle {
            Some(handle) => pass(handle, said),
            None => self.early.push(said),
        }
    }
}

fn pass(handle: &SourceHandle, said: Said) {
    match said {
        Said::Chunk(tokens) => handle.chunk(tokens),
        Said::Failed(error) => handle.abort(error),
        Said::Finished(first) => {
            handle.finish(kvferry_session::FirstToken { token: first.id, logprob: first.logprob });
        }
    }
}

/// [`HandOff`] over a node's source rooms.
#[derive(Default)]
pub struct NodeHandOff {
    rooms: Mutex<HashMap<RoomKey, Room>>,
}

impl std::fmt::Debug for NodeHandOff {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NodeHandOff").field("rooms", &self.rooms().len()).finish()
    }
}

impl NodeHandOff {
    fn rooms(&self) -> MutexGuard<'_, HashMap<RoomKey, Room>> {
        // Every change is one insert, one push or one remove: a panic cannot leave half of one.
        self.rooms.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps what the engine says of `key` from now on. False when the key is taken.
    pub(crate) fn expect(&self, key: RoomKey) -> bool {
        let mut rooms = self.rooms();
        if rooms.contains_key(&key) {
            return false;
        }
        rooms.insert(key, Room::default());
        true
    }

    /// Passes on what was kept, and all that follows, to the room.
    pub(crate) fn attach(&self, key: RoomKey, handle: &Arc<SourceHandle>) {
        if let Some(room) = self.rooms().get_mut(&key) {
            for said in std::mem::take(&mut room.early) {
                pass(handle, said);
            }
            room.handle = Some(Arc::clone(handle));
        }
    }

    /// Ends a room: what the engine still says of it goes nowhere. Answers how its computation ended, if it did.
    pub(crate) fn forget(&self, key: RoomKey) -> Option<Result<FirstToken, EngineError>> {
        let room = self.rooms().remove(&key)?;
        room.failure.map(Err).or_else(|| room.first.map(Ok))
    }
}

impl HandOff for NodeHandOff {
    fn chunk(&self, key: RoomKey, tokens: TokenRange) {
        if let Some(room) = self.rooms().get_mut(&key) {
            room.say(Said::Chunk(tokens));
        }
    }

    fn finished(&self, key: RoomKey, first: FirstToken) {
        if let Some(room) = self.rooms().get_mut(&key) {
            room.say(Said::Finished(first));
        }
    }

    fn failed(&self, key: RoomKey, cause: &EngineError) {
        if let Some(room) = self.rooms().get_mut(&key) {
            room.say(Said::Failed(cause.clone()));
        }
    }
}
