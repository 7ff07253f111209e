//! Sans-IO state machines of a hand-off and their wire messages, no_std.
