//! Rooms that have ended, for as long as somebody may still talk about them.

use alloc::collections::{BTreeMap, VecDeque};
use core::time::Duration;
use kvferry_plan::RoomKey;

use crate::{Cause, Closed, Head, Message, Side, Time};

/// Bounded memory of ended rooms: each lives for a fixed time, and when there are too many the oldest goes first.
#[derive(Debug)]
pub struct Tombstones {
    life: Duration,
    most: usize,
    ends: BTreeMap<RoomKey, Option<Cause>>,
    order: VecDeque<(Time, RoomKey)>,
}

impl Tombstones {
    /// Remembers up to `most` rooms for `life`.
    #[must_use]
    pub fn new(life: Duration, most: usize) -> Self {
        Self { life, most, ends: BTreeMap::new(), order: VecDeque::new() }
    }

    /// Remembers how a room ended; nothing as cause when it was completed. The first end stays.
    pub fn bury(&mut self, key: RoomKey, cause: Option<Cause>, now: Time) {
        self.sweep(now);
        if self.ends.contains_key(&key) || self.most == 0 {
            return;
        }
        while self.order.len() >= self.most {
            if let Some((_, oldest)) = self.order.pop_front() {
                self.ends.remove(&oldest);
            }
        }
        self.ends.insert(key, cause);
        self.order.push_back((now, key));
    }

    /// How the room ended, if it is remembered.
    #[must_use]
    pub fn end(&self, key: RoomKey) -> Option<&Option<Cause>> {
        self.ends.get(&key)
    }

    /// The answer to a message for a room that is not alive on `side`: `None` when it deserves none.
    #[must_use]
    pub fn answer(&self, message: &Message, side: Side) -> Option<Message> {
        let head: Head = *message.head()?;
        match (message, side) {
            (Message::Closed(_), _) | (Message::Abort(_), Side::Source) => None,
            _ => {
                let unknown =
                    || Some(Cause::new(crate::CauseKind::Unknown, side, alloc::format!("room {}", head.key)));
                let cause = self.end(head.key).map_or_else(unknown, Clone::clone);
                Some(Message::Closed(Closed { head: head.reply(), cause }))
            }
        }
    }

    /// Forgets rooms whose time is over.
    pub fn sweep(&mut self, now: Time) {
        while let Some((at, key)) = self.order.front().copied() {
            if now.since(at) < self.life {
                break;
            }
            self.order.pop_front();
            self.ends.remove(&key);
        }
    }

    /// How many rooms are remembered.
    #[must_use]
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// True when no room is remembered.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }
}
