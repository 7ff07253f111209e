//! What a target knows of a room's bytes: what was offered, what landed, what the manifests declare. Sets keyed
//! by full identity, so repeats and reordering change nothing.

use alloc::{
    collections::BTreeMap,
    format,
    string::{String, ToString},
    vec::Vec,
};
use kvferry_plan::{Accepted, Bytes, Coverage, Pair, PartDigest, RankId, TokenRange};

use crate::{Final, FirstToken, Leg};

/// A finding: what does not fit, in words.
pub(crate) type Finding = String;

/// Bytes that must land at a target rank: what it holds of the tokens, and of the request's state.
pub(crate) fn due(pair: &Pair, target: RankId, tokens: TokenRange) -> Bytes {
    Bytes(pair.target_bytes(target, tokens).0.saturating_add(pair.state_bytes(target).0))
}

/// Sums over a complete room.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Totals {
    pub(crate) first: FirstToken,
    pub(crate) bytes: Bytes,
    pub(crate) copies: u64,
}

/// Everything that has been said and seen about a room's bytes.
#[derive(Debug)]
pub(crate) struct Intake {
    tokens: TokenRange,
    sources: u32,
    /// Of all target ranks those that live here.
    targets: Vec<RankId>,
    all_targets: u32,
    digest: bool,
    offers: Coverage,
    landed: BTreeMap<(RankId, TokenRange, RankId), Leg>,
    finals: BTreeMap<RankId, Manifest>,
    /// Legs that are declared and have not landed.
    due: u64,
}

/// A [`Final`], keyed for lookup.
#[derive(Debug, PartialEq, Eq)]
struct Manifest {
    first: FirstToken,
    legs: BTreeMap<(TokenRange, RankId), Leg>,
}

impl Intake {
    pub(crate) fn new(pair: &Pair, targets: Vec<RankId>, tokens: TokenRange, digest: bool) -> Self {
        Self {
            tokens,
            sources: pair.src().ranks(),
            targets,
            all_targets: pair.dst().ranks(),
            digest,
            offers: Coverage::new(pair.src().ranks(), tokens),
            landed: BTreeMap::new(),
            finals: BTreeMap::new(),
            due: 0,
        }
    }

    /// Notes an offer after checking its bounds and that it overlaps no other of its rank. False for a repeat.
    pub(crate) fn offer(&mut self, source: RankId, tokens: TokenRange) -> Result<bool, Finding> {
        let accepted = self.offers.accept(source, tokens).map_err(|e| e.to_string())?;
        Ok(accepted == Accepted::New)
    }

    /// Notes bytes that arrived in our pool. False for a repeat.
    pub(crate) fn landed(&mut self, source: RankId, leg: Leg) -> Result<bool, Finding> {
        if leg.bytes() == Bytes(0) {
            return Ok(false);
        }
        let at = (source, leg.tokens, leg.target);
        if let Some(earlier) = self.landed.get(&at) {
            if *earlier == leg {
                return Ok(false);
            }
            return Err(format!(
                "source rank {source} landed tokens {} at target rank {} twice, with different content",
                leg.tokens, leg.target
            ));
        }
        if let Some(declared) = self.declared(source, leg.tokens, leg.target) {
            self.compare(source, declared, &leg)?;
            self.due = self.due.saturating_sub(1);
        }
        self.landed.insert(at, leg);
        Ok(true)
    }

    /// Notes a manifest and compares it with what has landed so far. False for a repeat.
    pub(crate) fn finish(&mut self, message: &Final) -> Result<bool, Finding> {
        let source = message.source;
        self.check_source(source)?;
        let mut legs = BTreeMap::new();
        for leg in message.legs.iter().filter(|l| l.bytes() > Bytes(0)) {
            self.check_tokens(source, leg.tokens)?;
            if leg.target.0 >= self.all_targets {
                return Err(format!(
                    "source rank {source} declared bytes for target rank {}, of {}",
                    leg.target, self.all_targets
                ));
            }
            if !self.targets.contains(&leg.target) {
                return Err(format!(
                    "source rank {source} declared bytes for target rank {}, which lives elsewhere",
                    leg.target
                ));
            }
            if legs.insert((leg.tokens, leg.target), leg.clone()).is_some() {
                return Err(format!(
                    "source rank {source} declared tokens {} for target rank {} twice",
                    leg.tokens, leg.target
                ));
            }
        }
        let manifest = Manifest { first: message.first, legs };
        if let Some(earlier) = self.finals.get(&source) {
            if *earlier == manifest {
                return Ok(false);
            }
            return Err(format!("source rank {source} sent two different manifests"));
        }
        if let Some((other, f)) = self.finals.iter().find(|(_, f)| f.first != manifest.first) {
            return Err(format!(
                "source ranks {other} and {source} name different first tokens, {} and {}",
                f.first.token, manifest.first.token
            ));
        }
        let mut due = self.due;
        for (&(tokens, target), leg) in &manifest.legs {
            match self.landed.get(&(source, tokens, target)) {
                Some(landed) => self.compare(source, leg, landed)?,
                None => due = due.saturating_add(1),
            }
        }
        self.due = due;
        self.finals.insert(source, manifest);
        Ok(true)
    }

    /// True when every source rank has sent its manifest.
    pub(crate) fn all_final(&self) -> bool {
        self.finals.len() as u64 == u64::from(self.sources)
    }

    /// True when at least one source rank has sent its manifest.
    pub(crate) fn some_final(&self) -> bool {
        !self.finals.is_empty()
    }

    /// The totals when everything declared has landed and covers every byte that the target owns; `None` while
    /// something may still come.
    pub(crate) fn complete(&self, pair: &Pair) -> Result<Option<Totals>, Finding> {
        if !self.all_final() || self.due > 0 || !self.offers.complete() {
            return Ok(None);
        }
        let mut by_target: BTreeMap<RankId, u64> = BTreeMap::new();
        let mut copies = 0_u64;
        for (&(source, tokens, target), leg) in &self.landed {
            if self.declared(source, tokens, target).is_none() {
                return Err(format!(
                    "source rank {source} landed {} bytes of tokens {tokens} at target rank {target} \
                     and declared none",
                    leg.bytes()
                ));
            }
            // Offered chunks of a rank are disjoint: only then do bytes that add up say that none is missing.
            if !self.offers.has(source, tokens) {
                return Err(format!(
                    "source rank {source} landed tokens {tokens}, which it did not offer so"
                ));
            }
            let sum = by_target.entry(target).or_default();
            *sum = sum.saturating_add(leg.bytes().0);
            copies = copies.saturating_add(leg.copies);
        }
        let mut bytes = 0_u64;
        for &target in &self.targets {
            let is = by_target.get(&target).copied().unwrap_or(0);
            let due = due(pair, target, self.tokens).0;
            if is != due {
                return Err(format!("target rank {target} owns {due} bytes of the room and got {is}"));
            }
            bytes = bytes.saturating_add(is);
        }
        let Some(first) = self.finals.values().next().map(|f| f.first) else { return Ok(None) };
        Ok(Some(Totals { first, bytes: Bytes(bytes), copies }))
    }

    /// What is still due, in words: the finding of a room that ran out of time.
    pub(crate) fn missing(&self) -> Finding {
        for (source, manifest) in &self.finals {
            let mut due: BTreeMap<RankId, (u64, u64)> = BTreeMap::new();
            for (&(tokens, target), leg) in &manifest.legs {
                let sums = due.entry(target).or_default();
                sums.0 = sums.0.saturating_add(leg.bytes().0);
                if let Some(landed) = self.landed.get(&(*source, tokens, target)) {
                    sums.1 = sums.1.saturating_add(landed.bytes().0);
                }
            }
            if let Some((target, (declared, landed))) = due.iter().find(|(_, (d, l))| l < d) {
                return format!(
                    "source rank {source} declared {declared} bytes for rank {target}, {landed} landed"
                );
            }
        }
        let absent: Vec<_> = (0..self.sources).filter(|r| !self.finals.contains_key(&RankId(*r))).collect();
        if absent.is_empty() {
            let gap = (0..self.sources).map(RankId).find_map(|r| Some((r, self.offers.gap(r)?)));
            match gap {
                Some((source, gap)) => format!("source rank {source} did not offer tokens {gap}"),
                None => "nothing".into(),
            }
        } else {
            format!("no manifest from source ranks {absent:?}")
        }
    }

    fn declared(&self, source: RankId, tokens: TokenRange, target: RankId) -> Option<&Leg> {
        self.finals.get(&source)?.legs.get(&(tokens, target))
    }

    fn check_source(&self, source: RankId) -> Result<(), Finding> {
        if source.0 < self.sources {
            return Ok(());
        }
        Err(format!("source rank {source} of an instance with {}", self.sources))
    }

    fn check_tokens(&self, source: RankId, tokens: TokenRange) -> Result<(), Finding> {
        if !tokens.is_empty() && tokens.start >= self.tokens.start && tokens.end <= self.tokens.end {
            return Ok(());
        }
        Err(format!("source rank {source} named tokens {tokens} of a room for tokens {}", self.tokens))
    }

    fn compare(&self, source: RankId, declared: &Leg, landed: &Leg) -> Result<(), Finding> {
        let bytes = |leg: &Leg, part| {
            leg.parts.iter().filter(|p| p.part == part).fold(0_u64, |n, p| n.saturating_add(p.bytes.0))
        };
        let sum = |leg: &Leg, part| {
            leg.parts.iter().filter(|p| p.part == part).fold(0_u64, |n, p| n.wrapping_add(p.sum))
        };
        let between = || format!("from source rank {source} to target rank {}", declared.target);
        let chunk = declared.tokens;
        for PartDigest { part, .. } in declared.parts.iter().chain(&landed.parts) {
            let (d, l) = (bytes(declared, *part), bytes(landed, *part));
            if d != l {
                return Err(format!(
                    "part {part} {}: {d} bytes declared, {l} landed (chunk {chunk})",
                    between()
                ));
            }
            if self.digest && sum(declared, *part) != sum(landed, *part) {
                return Err(format!("digest of part {part} {} differs (chunk {chunk})", between()));
            }
        }
        Ok(())
    }
}
