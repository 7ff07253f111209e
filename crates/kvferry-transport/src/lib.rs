//! The transport trait, mem, shm and tcp, and the public contract suite.
