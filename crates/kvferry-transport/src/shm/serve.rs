//! The source's end of a connection: gives its arenas away, for reading, and waits until the target is gone.

use std::sync::Arc;

use crate::{
    local::Local,
    shm::{fds, ours},
    socket::{Lost, Socket},
    stats::add,
};

/// Serves one connection until it ends.
pub(super) fn serve(local: &Arc<Local>, socket: &Socket) -> Result<(), Lost> {
    let setup = &local.setup;
    if !ours(socket) {
        add(&local.counters.turned_away, 1);
        return Ok(());
    }
    let arenas = local.arenas();
    let ranks = u32::try_from(arenas.len()).unwrap_or(u32::MAX);
    if socket.welcome(setup.incarnation, Some(ranks), setup.limits.connect)?.is_none() {
        add(&local.counters.turned_away, 1);
        return Ok(());
    }
    for (rank, arena) in &arenas {
        fds::send(socket, *rank, arena)?;
    }
    // The target has nothing to say; the end of its process ends the connection.
    match socket.fill(&mut [0], true) {
        Ok(()) => Err(Lost::Malformed("bytes where the target has nothing to say")),
        Err(lost) => Err(lost),
    }
}
