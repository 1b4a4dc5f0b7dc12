//! Drafts by look-up: the tokens that followed the most recent earlier occurrence of the sequence's last tokens.
//!
//! Each request has an index of its n-grams, built when first asked and continued as tokens are committed, so that a
//! proposal costs the same whatever the length of the history. The index has a fixed size: in a long sequence a newer
//! n-gram may displace another one, which loses a draft. A hit is compared token by token, so it is never a wrong one.

use crate::request::Request;
use crate::scheduler::Scheduler;
use thiserror::Error;

const MIN_PLACES: usize = 1 << 6;
const MAX_PLACES: usize = 1 << 15;
/// Places at which an n-gram may stand, from its hash on.
const NUM_PROBES: usize = 4;
const EMPTY: u32 = 0;

/// Arguments of a proposal that cannot work.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[allow(missing_docs)]
pub enum NgramError {
    #[error("min_n is {min_n} and max_n is {max_n}; they must satisfy 1 <= min_n <= max_n <= 16")]
    Bounds { min_n: usize, max_n: usize },
    #[error("{name} has {got} entries; {max_num_seqs} slots with k = {k} need {expected}")]
    Shape {
        name: &'static str,
        got: usize,
        expected: usize,
        max_num_seqs: usize,
        k: usize,
    },
}

/// Where each n-gram of a sequence ended last: a hash table for each n.
#[derive(Debug)]
pub(crate) struct NgramIndex {
    min_n: usize,
    max_n: usize,
    /// Places of each table, a power of two.
    num_places: usize,
    /// Ends of n-grams (the position after the last token), `[max_n - min_n + 1, num_places]`; `EMPTY`: none.
    ends: Vec<u32>,
    /// N-grams that end at `..=num_indexed` are in the tables.
    num_indexed: usize,
}

impl NgramIndex {
    fn new(min_n: usize, max_n: usize, max_len: usize) -> Self {
        let num_places = (2 * max_len)
            .next_power_of_two()
            .clamp(MIN_PLACES, MAX_PLACES);
        let ends = vec![EMPTY; num_places * (max_n - min_n + 1)];
        Self {
            min_n,
            max_n,
            num_places,
            ends,
            num_indexed: 0,
        }
    }

    /// Enters the n-grams that end before the last token's end: they are the earlier occurrences.
    fn extend(&mut self, tokens: &[i32]) {
        for end in self.num_indexed + 1..tokens.len() {
            let mut hash = 0;
            for n in 1..=self.max_n.min(end) {
                hash = mix(hash, tokens[end - n]);
                if n >= self.min_n {
                    let place = self.place(tokens, n, hash, &tokens[end - n..end]);
                    self.ends[place] = end as u32;
                }
            }
            self.num_indexed = end;
        }
    }

    /// The position after the most recent earlier occurrence of the longest suffix that has one.
    fn find(&self, tokens: &[i32]) -> Option<usize> {
        let mut hash = 0;
        let mut found = None;
        for n in 1..=self.max_n.min(tokens.len() - 1) {
            hash = mix(hash, tokens[tokens.len() - n]);
            if n >= self.min_n {
                let suffix = &tokens[tokens.len() - n..];
                let end = self.ends[self.place(tokens, n, hash, suffix)] as usize;
                if end >= n && tokens[end - n..end] == *suffix {
                    found = Some(end);
                }
            }
        }
        found
    }

    /// Where an n-gram stands or would be entered: its own place, else an empty one, else the first one.
    fn place(&self, tokens: &[i32], n: usize, hash: u64, ngram: &[i32]) -> usize {
        let table = (n - self.min_n) * self.num_places;
        // The high bits of a product are the well mixed ones.
        let first = (hash >> 32) as usize;
        let places = (0..NUM_PROBES).map(|probe| table + ((first + probe) & (self.num_places - 1)));
        let is_its_own = |end: usize| end == EMPTY as usize || tokens[end - n..end] == *ngram;
        places
            .clone()
            .find(|&place| is_its_own(self.ends[place] as usize))
            .unwrap_or(table + (first & (self.num_places - 1)))
    }
}

fn mix(hash: u64, token: i32) -> u64 {
    (hash.rotate_left(5) ^ (token as u64 + 1)).wrapping_mul(0x9E37_79B9_7F4A_7C15)
}

/// Writes the tokens from `start` on; where they run past the end of the sequence they go on with the drafts themselves,
/// so that a loop is drafted round and round.
fn copy_from(tokens: &[i32], start: usize, drafts: &mut [i32]) {
    for i in 0..drafts.len() {
        let from = start + i;
        drafts[i] = if from < tokens.len() {
            tokens[from]
        } else {
            drafts[from - tokens.len()]
        };
    }
}

impl Scheduler {
    /// Drafts for every decoding request, by slot: up to `k` tokens into `out_tokens` `[max_num_seqs, k]`, their number
    /// into `out_lens` `[max_num_seqs]` (0 elsewhere). A match has `min_n..=max_n` tokens, the longest one wins, then
    /// the most recent. Returns the number of draft tokens.
    ///
    /// # Errors
    /// Bounds or shapes that do not fit; nothing is written then.
    pub fn propose_ngram(
        &mut self,
        k: usize,
        min_n: usize,
        max_n: usize,
        out_tokens: &mut [i32],
        out_lens: &mut [i32],
    ) -> Result<usize, NgramError> {
        if min_n < 1 || min_n > max_n || max_n > 16 {
            return Err(NgramError::Bounds { min_n, max_n });
        }
        let max_num_seqs = self.config.max_num_seqs as usize;
        for (name, got, expected) in [
            ("out_tokens", out_tokens.len(), max_num_seqs * k),
            ("out_lens", out_lens.len(), max_num_seqs),
        ] {
            if got != expected {
                return Err(NgramError::Shape {
                    name,
                    got,
                    expected,
                    max_num_seqs,
                    k,
                });
            }
        }
        out_lens.fill(0);
        let mut num_drafts = 0;
        for i in 0..self.running.len() {
            let key = self.running[i];
            let request = self.request_mut(key);
            if let Some(slot) = request.slot.filter(|_| request.is_decoding) {
                let at = slot.0 as usize;
                let len = propose(request, min_n, max_n, &mut out_tokens[at * k..(at + 1) * k]);
                out_lens[at] = len as i32;
                num_drafts += len;
            }
        }
        Ok(num_drafts)
    }
}

fn propose(request: &mut Request, min_n: usize, max_n: usize, out: &mut [i32]) -> usize {
    let num_drafts = out.len().min(request.draft_limit() as usize);
    if num_drafts == 0 {
        return 0;
    }
    let is_same = |index: &NgramIndex| index.min_n == min_n && index.max_n == max_n;
    if !request.cold.ngram.as_deref().is_some_and(is_same) {
        request.cold.ngram = Some(Box::new(NgramIndex::new(
            min_n,
            max_n,
            request.max_len as usize,
        )));
    }
    let Some(index) = request.cold.ngram.as_deref_mut() else {
        return 0;
    };
    index.extend(&request.tokens);
    match index.find(&request.tokens) {
        Some(start) => {
            copy_from(&request.tokens, start, &mut out[..num_drafts]);
            num_drafts
        }
        None => 0,
    }
}
