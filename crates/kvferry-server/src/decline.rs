//! Rooms that come to nothing before they are handed over: the other side, which may wait for them, is told.

use std::{sync::Arc, time::Duration};

use axum::http::StatusCode;
use kvferry_engine::EngineError;
use kvferry_node::{Cause, CauseKind, PeerAddr, Side};
use kvferry_plan::{Blame, InstanceId, RoomKey};
use kvferry_registry::Member;
use tokio::time::timeout;

use crate::{Problem, Stage, instance::Shared};

/// For finding out whether there is something to be told, and who is to be told.
const BOUND: Duration = Duration::from_secs(1);
/// Between two looks at a room that may be about to go.
const PAUSE: Duration = Duration::from_millis(20);

/// Decode has refused or given up a room: the prefill instance is told, unless the node has done so. A duplicate of a
/// room that lives here says nothing about that room.
pub(crate) fn decline(shared: &Arc<Shared>, key: RoomKey, prefill: &InstanceId, problem: &Problem) {
    let early = matches!(problem.stage, Stage::Admission | Stage::Lookup);
    if !early || problem.status == Some(StatusCode::CONFLICT) {
        return;
    }
    let (cause, prefill, inner) = (cause(problem, Side::Target), prefill.clone(), Arc::clone(shared));
    shared.tasks.spawn(async move {
        let Shared { engine, node, registry, .. } = &*inner;
        // What was given up a moment ago may still be known here; what lives on is not declined.
        let forgotten = async {
            while !matches!(async { engine.rows(key)?.await }.await, Err(EngineError::UnknownRoom(_))) {
                tokio::time::sleep(PAUSE).await;
            }
        };
        if timeout(BOUND, forgotten).await.is_err() {
            return;
        }
        // A prefill that nobody knows cannot be told; its own limit ends the room.
        if let Ok(Ok(group)) = timeout(BOUND, registry.lookup(&prefill)).await {
            node.decline(key, group.members.into_iter().map(address).collect(), cause);
        }
    });
}

/// Prefill has refused or given up a room that it has not announced: whoever has opened it is told.
pub(crate) fn withhold(shared: &Shared, key: RoomKey, problem: &Problem) {
    shared.node.withhold(key, cause(problem, Side::Source));
}

/// Where the node of a member is reached.
pub(crate) fn address(member: Member) -> PeerAddr {
    PeerAddr { instance: member.instance, incarnation: member.incarnation, endpoint: member.control }
}

fn cause(problem: &Problem, at: Side) -> Cause {
    let kind = match problem.blame {
        Blame::Caller => CauseKind::Aborted,
        Blame::Environment => CauseKind::Unavailable,
        _ => CauseKind::Other,
    };
    Cause::new(kind, at, &problem.cause)
}
