//! Proof that the pure crates are pure: a static library with its own panic handler and allocator. Anything below
//! that links std brings a second panic handler, which the compiler refuses (E0152).
//!
//! Not for running: the allocator has no memory.

#![no_std]

#[cfg(feature = "taint")]
extern crate std;

use core::alloc::{GlobalAlloc, Layout};
use core::panic::PanicInfo;
use kvferry_session as _;

struct NoMemory;

// SAFETY: null is always a correct answer to an allocation, and nothing was allocated that could be freed.
unsafe impl GlobalAlloc for NoMemory {
    unsafe fn alloc(&self, _: Layout) -> *mut u8 {
        core::ptr::null_mut()
    }

    unsafe fn dealloc(&self, _: *mut u8, _: Layout) {}
}

#[global_allocator]
static ALLOCATOR: NoMemory = NoMemory;

#[panic_handler]
fn panic(_: &PanicInfo<'_>) -> ! {
    loop {
        core::hint::spin_loop();
    }
}

/// Reaches the planner, so that it is linked and not only loaded.
// SAFETY: nothing else defines this name.
#[unsafe(no_mangle)]
pub extern "C" fn kvferry_proof(layers: u32, tokens: u64) -> u64 {
    use kvferry_plan::{CacheShape, Dtype, End, PageTable, Pair, Placement, RankId, TokenRange};
    let shape = CacheShape::mla(layers, 576);
    let single = Placement::single(&shape, 64, Dtype::Bf16);
    let table = PageTable::identity(8);
    let end = End { rank: RankId(0), table: &table };
    Pair::new(shape, single.clone(), single)
        .and_then(|pair| pair.plan(end, end, TokenRange::new(0, tokens)))
        .map_or(0, |plan| plan.bytes().0)
}
