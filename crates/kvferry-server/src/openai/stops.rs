//! Finds stop strings in a text that comes in pieces, and holds back what may be the beginning of one.

/// A text up to the first stop string: the one that is complete first, and of several that end together the longest.
/// The result does not depend on how the text is cut into pieces.
#[derive(Clone, Debug)]
pub(crate) struct StopFinder {
    stops: Vec<String>,
    held: String,
}

impl StopFinder {
    /// Looks for any of `stops`, none of which may be empty.
    pub(crate) fn new(stops: Vec<String>) -> Self {
        Self { stops, held: String::new() }
    }

    /// Takes a piece; answers the text that certainly comes before any stop string, and whether one was found: then the
    /// text is over.
    pub(crate) fn push(&mut self, piece: &str) -> (String, bool) {
        self.held += piece;
        let found = self.stops.iter().filter_map(|stop| Some((stop, self.held.find(stop.as_str())?)));
        if let Some(start) =
            found.map(|(stop, start)| (start + stop.len(), start)).min().map(|(_, start)| start)
        {
            let mut before = std::mem::take(&mut self.held);
            before.truncate(start);
            return (before, true);
        }
        let kept = self.stops.iter().map(|stop| begun(&self.held, stop)).max().unwrap_or(0);
        let kept = self.held.split_off(self.held.len() - kept);
        (std::mem::replace(&mut self.held, kept), false)
    }

    /// The text that was held back, when no more will come.
    pub(crate) fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

/// Bytes at the end of `text` that begin `stop`.
fn begun(text: &str, stop: &str) -> usize {
    let (text, stop) = (text.as_bytes(), stop.as_bytes());
    let longest = text.len().min(stop.len().saturating_sub(1));
    (1..=longest).rev().find(|len| text.ends_with(&stop[..*len])).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The same with the whole text at hand, end by end.
    fn naive(text: &str, stops: &[String]) -> (String, bool) {
        for end in (0..=text.len()).filter(|end| text.is_char_boundary(*end)) {
            let ends_here = stops.iter().filter(|stop| text[..end].ends_with(stop.as_str()));
            if let Some(longest) = ends_here.map(String::len).max() {
                return (text[..end - longest].to_owned(), true);
            }
        }
        (text.to_owned(), false)
    }

    /// Feeds pieces until the end or a stop.
    fn pieces<'a>(finder: &mut StopFinder, pieces: impl IntoIterator<Item = &'a str>) -> (String, bool) {
        let mut text = String::new();
        for piece in pieces {
            let (new, stopped) = finder.push(piece);
            text += &new;
            if stopped {
                return (text, true);
            }
        }
        (text + &finder.finish(), false)
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(2000) })]

        #[test]
        fn pieces_do_not_matter(
            text in prop::collection::vec("[abé→]{0,4}", 0..8),
            stops in prop::collection::vec("[abé→]{1,4}", 0..4),
        ) {
            let mut finder = StopFinder::new(stops.clone());
            let found = pieces(&mut finder, text.iter().map(String::as_str));
            prop_assert_eq!(found, naive(&text.concat(), &stops));
        }

        /// What was told never has to be taken back: it is a beginning of the answer after every piece.
        #[test]
        fn nothing_of_a_stop_leaks(text in "[ab]{0,12}", stop in "[ab]{1,5}") {
            let answer = naive(&text, std::slice::from_ref(&stop)).0;
            let (mut finder, mut told) = (StopFinder::new(vec![stop]), String::new());
            for at in 0..text.len() {
                let (new, stopped) = finder.push(&text[at..=at]);
                told += &new;
                prop_assert!(answer.starts_with(&told), "{told:?} of {answer:?}");
                if stopped {
                    break;
                }
            }
        }
    }

    #[test]
    fn text_that_cannot_begin_a_stop_is_told_at_once() {
        let mut finder = StopFinder::new(vec!["END".into()]);
        assert_eq!(finder.push("one E"), ("one ".into(), false));
        assert_eq!(finder.push("N"), (String::new(), false));
        assert_eq!(finder.push("d EN"), ("ENd ".into(), false));
        assert_eq!(finder.push("D tail"), (String::new(), true));
        assert_eq!(StopFinder::new(Vec::new()).push("all"), ("all".into(), false));
    }
}
