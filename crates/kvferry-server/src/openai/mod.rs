//! The OpenAI-compatible API, over any [`Backend`]: texts and shapes outside, token ids inside.
//!
//! A body is read with the name of the field that is wrong ([`body`]), understood against the model ([`request`]), and
//! becomes one [`choice`] per continuation. A [`run`] holds them together: it counts, and ends all when one fails or when
//! the client leaves. [`shape`] writes what comes out, whole or as server-sent events ([`stream`]).
//!
//! *Not* for computing, for choosing instances or for queues: those are behind the trait.

mod api;
mod body;
mod choice;
mod error;
mod request;
mod run;
mod shape;
mod stops;
mod stream;
#[cfg(test)]
mod tests;
mod text;
mod unserved;

pub(crate) use api::Api;
