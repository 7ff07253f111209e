//! Facade and the one binary.
