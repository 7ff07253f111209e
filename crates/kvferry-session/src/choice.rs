//! Which transport a pair uses, of those that both sides have, and why. Not for whether it works: who finds that it does
//! not takes the next.

use alloc::{format, string::String, vec::Vec};

/// kvferry's own order, which decides where two sides want different ones: first its own transports, on one host the one
/// that copies once, then engines of others. The one whose engine cannot be kept to one address is last.
const ORDER: [&str; 6] = ["mem", "shm", "tcp", "nixl", "mooncake-tcp", "mooncake"];

/// A transport that both sides have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// Its name.
    pub transport: &'static str,
    /// Why it comes before those that follow it.
    pub why: String,
}

/// The transports that both sides have, the best first, from the lists of both, each in the order in which its side wants
/// them. One that both want less than another comes after it; what the sides disagree about, kvferry's own order decides:
/// `mem`, `shm`, `tcp`, `nixl`, `mooncake-tcp`, `mooncake`. So both sides say the same, and the last of these is never
/// taken where another is common, unless both want it more. Names that nobody here knows are left out.
///
/// ```
/// use kvferry_session::choices;
/// let of = |prefill: &[&str], decode: &[&str]| choices(prefill, decode).remove(0);
/// assert_eq!(of(&["shm", "tcp"], &["tcp"]).why, "the only one that both have");
/// assert_eq!(of(&["nixl", "tcp"], &["nixl", "shm", "tcp"]).transport, "nixl");
/// let disputed = of(&["tcp", "nixl"], &["nixl", "tcp"]);
/// assert_eq!((disputed.transport, choices(&["shm"], &["tcp"]).len()), ("tcp", 0));
/// assert_eq!(
///     disputed.why,
///     "both have tcp and nixl; prefill wants tcp first and decode nixl, so kvferry's order decides"
/// );
/// ```
#[must_use]
pub fn choices(prefill: &[&str], decode: &[&str]) -> Vec<Choice> {
    let place = |list: &[&str], name: &str| list.iter().position(|other| *other == name);
    let wanted = |name| Some((place(prefill, name)?, place(decode, name)?));
    let mut left: Vec<_> = ORDER.into_iter().filter_map(|name| Some((name, wanted(name)?))).collect();
    let mut choices = Vec::with_capacity(left.len());
    loop {
        let behind = |(at, to): (usize, usize)| left.iter().any(|(_, (p, d))| *p < at && *d < to);
        let Some(best) = left.iter().position(|(_, places)| !behind(*places)) else { return choices };
        let why = why(&left, best, choices.is_empty());
        let (transport, _) = left.remove(best);
        choices.push(Choice { transport, why });
    }
}

/// In words, why one of those that are left is taken.
fn why(left: &[(&'static str, (usize, usize))], best: usize, all: bool) -> String {
    let names: Vec<_> = left.iter().map(|(name, _)| *name).collect();
    let first = |by: fn(&(usize, usize)) -> usize| {
        left.iter().min_by_key(|(_, places)| by(places)).map_or("", |(name, _)| *name)
    };
    let (prefill, decode) = (first(|(p, _)| *p), first(|(_, d)| *d));
    match names.split_last() {
        Some((last, rest)) if !rest.is_empty() => {
            let both = format!("both have {} and {last}", rest.join(", "));
            if prefill == decode {
                return format!("{both}, and want {} first", names.get(best).unwrap_or(&""));
            }
            format!("{both}; prefill wants {prefill} first and decode {decode}, so kvferry's order decides")
        }
        _ if all => "the only one that both have".into(),
        _ => "the last of those that both have".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every list of up to three of the names.
    fn lists() -> Vec<Vec<&'static str>> {
        let mut lists = Vec::from([Vec::new()]);
        for at in 0.. {
            let Some(list): Option<&Vec<_>> = lists.get(at) else { break };
            let more = ORDER.into_iter().filter(|name| list.len() < 3 && !list.contains(name));
            let more: Vec<Vec<_>> = more.map(|name| [&list[..], &[name]].concat()).collect();
            lists.extend(more);
        }
        lists
    }

    #[test]
    fn both_sides_say_the_same_and_nothing_that_both_want_less_comes_first() {
        for prefill in lists() {
            for decode in lists() {
                let choices = choices(&prefill, &decode);
                let found: Vec<_> = choices.iter().map(|choice| choice.transport).collect();
                let turned: Vec<_> = super::choices(&decode, &prefill).iter().map(|c| c.transport).collect();
                assert_eq!(found, turned, "{prefill:?} {decode:?}");

                let mut common: Vec<_> = prefill.iter().filter(|name| decode.contains(name)).collect();
                common.sort();
                let mut sorted: Vec<_> = found.iter().collect();
                sorted.sort();
                assert_eq!(sorted, common);

                let before = |list: &[&str], a: &str, b: &str| {
                    list.iter().position(|name| *name == a) < list.iter().position(|name| *name == b)
                };
                for (at, worse) in found.iter().enumerate() {
                    for better in &found[at + 1..] {
                        let both = before(&prefill, better, worse) && before(&decode, better, worse);
                        assert!(!both, "{prefill:?} {decode:?}: {found:?}");
                    }
                    for after in &found[at + 1..] {
                        let both = before(&prefill, worse, after) && before(&decode, worse, after);
                        assert!(*worse != "mooncake" || both, "{prefill:?} {decode:?}: {found:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn the_reason_says_what_both_have_and_who_wants_what() {
        let why = |prefill: &[&str], decode: &[&str]| -> Vec<_> {
            choices(prefill, decode).into_iter().map(|c| (c.transport, c.why)).collect()
        };
        assert_eq!(
            why(&["nixl", "shm", "tcp"], &["tcp", "nixl", "carrier-pigeon"]),
            [
                ("tcp", "both have tcp and nixl; prefill wants nixl first and decode tcp, so kvferry's order decides"),
                ("nixl", "the last of those that both have"),
            ]
            .map(|(name, why)| (name, why.into()))
        );
        let same = why(&["mooncake", "tcp", "shm"], &["mooncake", "tcp", "shm"]);
        assert_eq!(same.iter().map(|(name, _)| *name).collect::<Vec<_>>(), ["mooncake", "tcp", "shm"]);
        assert_eq!(same[0].1, "both have shm, tcp and mooncake, and want mooncake first");
        assert_eq!(why(&["shm"], &["tcp"]), []);
    }
}
