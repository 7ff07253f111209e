//! What a peer can do with a descriptor, and what is refused from a peer.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::{
    fs::OpenOptions,
    io::Write,
    os::fd::{AsFd, AsRawFd, OwnedFd},
};

use kvferry_arena::{Arena, ArenaError, ArenaView, Memory};
use kvferry_plan::{Blame, Bytes, CacheShape, Dtype, PageId, Placement, PoolLayout, RankId};
use rustix::{
    fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create},
    io::pwrite,
};

fn layout(pages: u32) -> PoolLayout {
    let shape = CacheShape::mla(2, 64);
    let place = Placement::single(&shape, 16, Dtype::Bf16);
    PoolLayout::new(&shape, &place, RankId(0), pages).unwrap()
}

#[test]
fn a_peer_can_read_and_nothing_else() {
    let arena = Arena::new("test", layout(4)).unwrap();
    let at = arena.layout().regions()[1].offset;
    arena.write(at, b"owner").unwrap();

    let fd: OwnedFd = arena.fd().try_clone_to_owned().unwrap();
    assert!(ftruncate(&fd, 0).is_err(), "shrunk");
    assert!(ftruncate(&fd, arena.layout().len().0 * 2).is_err(), "grown");
    assert!(pwrite(&fd, b"peer", at.0).is_err(), "written");
    assert!(fcntl_add_seals(&fd, SealFlags::WRITE).is_err(), "sealed further");
    // Opened again, even for writing, the seals are the same.
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    if let Ok(mut file) = OpenOptions::new().read(true).write(true).open(path) {
        assert!(file.write_all(b"peer").is_err(), "written through /proc");
        assert!(file.set_len(1).is_err(), "shrunk through /proc");
    }

    let view = ArenaView::map(fd.as_fd(), layout(4)).unwrap();
    let mut seen = [0; 5];
    view.read(at, &mut seen).unwrap();
    assert_eq!(&seen, b"owner");
    // The owner goes on writing, and the view sees it, also when the owner is gone.
    arena.write(at, b"again").unwrap();
    assert_eq!(arena.next_generation(PageId(3)).unwrap().0, 1);
    drop(arena);
    view.read(at, &mut seen).unwrap();
    assert_eq!(&seen, b"again");
    assert_eq!(view.generation(PageId(3)).unwrap().0, 1);
    assert_eq!(view.generation(PageId(2)).unwrap().0, 0);
}

#[test]
fn memory_that_could_change_its_size_is_refused() {
    let layout = layout(4);
    let len = layout.len().0;
    let unsealed = |seals: SealFlags, size: u64| {
        let fd = memfd_create("peer", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&fd, size).unwrap();
        fcntl_add_seals(&fd, seals).unwrap();
        ArenaView::map(fd.as_fd(), layout.clone())
    };
    let all = SealFlags::SEAL | SealFlags::SHRINK | SealFlags::GROW | SealFlags::FUTURE_WRITE;
    assert!(unsealed(all, len).is_ok());
    for missing in [SealFlags::SEAL, SealFlags::SHRINK, SealFlags::GROW, SealFlags::FUTURE_WRITE] {
        let error = unsealed(all - missing, len).unwrap_err();
        assert!(matches!(error, ArenaError::Unsealed), "{missing:?}: {error}");
        assert_eq!(error.blame(), Blame::PeerMisbehaved);
    }
    for size in [0, 1, len - 1, len + 4096] {
        let error = unsealed(all, size).unwrap_err();
        assert!(matches!(error, ArenaError::Size { found, .. } if found == Bytes(size)), "{size}: {error}");
    }
    let (pipe, _other) = std::io::pipe().unwrap();
    assert!(matches!(ArenaView::map(pipe.as_fd(), layout.clone()), Err(ArenaError::Unsealed)));
    let file = tempfile::tempfile().unwrap();
    assert!(matches!(ArenaView::map(file.as_fd(), layout), Err(ArenaError::Unsealed)));
}

#[test]
fn impossible_pools_are_refused() {
    assert!(matches!(Arena::new("none", layout(0)), Err(ArenaError::Empty)));
    // 16 rows x 128 bytes x 2 layers x 4 billion pages: more than any machine has, and nothing may be taken of it.
    let error = Arena::new("huge", layout(u32::MAX)).unwrap_err();
    assert_eq!(error.blame(), Blame::Environment, "{error}");
    assert!(matches!(error, ArenaError::Memory { needed, available } if needed > available));
}

#[test]
fn generations_count_every_bump() {
    let arena = Arena::new("test", layout(4)).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| (0..1000).all(|_| arena.next_generation(PageId(1)).is_ok()));
        }
    });
    assert_eq!(arena.generation(PageId(1)).unwrap().0, 4000);
    assert_eq!(arena.generation(PageId(0)).unwrap().0, 0);
    assert!(matches!(arena.generation(PageId(4)), Err(ArenaError::NoPage(PageId(4)))));
    assert!(matches!(arena.next_generation(PageId(4)), Err(ArenaError::NoPage(PageId(4)))));
}
