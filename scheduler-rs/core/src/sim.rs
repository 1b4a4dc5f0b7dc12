//! A stand-in for the device: seeded acceptance for benches, and a token function of the history for tests.

use crate::scheduler::PlannedStep;

/// Small seeded generator (SplitMix64).
#[derive(Clone, Debug)]
pub struct SplitMix(u64);

impl SplitMix {
    /// The same seed gives the same numbers.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Uniform in `0..bound`; `bound` at least 1 and far below 2^64.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z ^ (z >> 31)) % bound
    }
}

/// The token that a deterministic model says after `history`.
pub fn model_token(history: &[i32], vocab_size: u32) -> i32 {
    let mut hash = history.len() as u64;
    for &token in history {
        hash = (hash.rotate_left(7) ^ token as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    }
    ((hash >> 33) % u64::from(vocab_size)) as i32
}

/// Accepts drafts at random: every sampling row emits 1 to drafts + 1 tokens.
#[derive(Clone, Debug)]
pub struct RandomAcceptance {
    random: SplitMix,
    vocab_size: u32,
    /// `[R]` of the last step.
    pub num_emitted: Vec<i32>,
    /// `[R, width]` of the last step.
    pub tokens: Vec<i32>,
    /// Most tokens a row can emit.
    pub width: usize,
}

impl RandomAcceptance {
    /// `width` is the most drafts of a row plus one.
    pub fn new(seed: u64, vocab_size: u32, width: usize) -> Self {
        Self {
            random: SplitMix::new(seed),
            vocab_size,
            num_emitted: Vec::new(),
            tokens: Vec::new(),
            width,
        }
    }

    /// Fills `num_emitted` and `tokens` for a step.
    pub fn decide(&mut self, step: &PlannedStep) {
        self.num_emitted.clear();
        self.tokens.clear();
        self.tokens.resize(step.num_reqs() * self.width, 0);
        for (i, (_, num_drafts, samples)) in step.rows().enumerate() {
            let num = if samples {
                1 + self.random.below(u64::from(num_drafts) + 1)
            } else {
                0
            };
            self.num_emitted.push(num as i32);
            for token in &mut self.tokens[i * self.width..][..num as usize] {
                *token = self.random.below(u64::from(self.vocab_size)) as i32;
            }
        }
    }
}
