//! Registered memory: sealed memfd arenas, page generations, the strided row copier.
