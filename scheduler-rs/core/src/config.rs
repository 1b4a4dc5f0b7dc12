//! The validated configuration and every size derived from it.

use crate::error::ConfigError;
use crate::packed_batch::{self, Counts};

/// Most page-table entries that admissions may add in one step beyond one sequence of full length.
const MAX_ADMISSION_PAGES: u64 = 65_536;

/// What the scheduler plans for. Lengths are in tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SchedulerConfig {
    /// Positions a page holds.
    pub page_size: u32,
    /// Pages of the KV cache.
    pub num_pages: u32,
    /// Slots: most requests that run at once.
    pub max_num_seqs: u32,
    /// Most tokens of one step, drafts included.
    pub max_num_batched_tokens: u32,
    /// Most tokens of one sequence, prompt and output together.
    pub max_model_len: u32,
    /// Token ids are `0..vocab_size`.
    pub vocab_size: u32,
    /// Most requests that wait for their first admission.
    pub max_waiting: u32,
    /// Whether full pages are kept for later requests with the same beginning.
    pub enable_prefix_caching: bool,
    /// Whether a page is found again only where the token after it is the same too. Needed when a drafter's entry at a
    /// position depends on the token at the next one, as those of draft heads do.
    pub page_hash_covers_next_token: bool,
    /// Most drafts of a row; 0 turns speculation off.
    pub num_speculative_tokens: u32,
    /// Whether decode rows draft in a step that also prefills.
    pub speculate_in_mixed_batches: bool,
    /// Tokens that end a sequence, unless the request ignores them.
    pub eos_token_ids: Vec<i32>,
    /// Secret of this process; page hashes cannot be guessed without it.
    pub cache_key: [u8; 32],
}

impl SchedulerConfig {
    /// Checks every field against its range and against the others.
    ///
    /// # Errors
    /// The first field that cannot work, with the numbers.
    pub fn validate(&self) -> Result<(), ConfigError> {
        at_least("page_size", self.page_size, 1)?;
        at_least("num_pages", self.num_pages, 1)?;
        at_least("max_num_seqs", self.max_num_seqs, 1)?;
        at_least("max_num_batched_tokens", self.max_num_batched_tokens, 1)?;
        at_least("max_model_len", self.max_model_len, 2)?;
        at_least("vocab_size", self.vocab_size, 1)?;
        at_least("max_waiting", self.max_waiting, 1)?;
        let limits = [
            (
                "num_pages * page_size",
                u64::from(self.num_pages) * u64::from(self.page_size),
            ),
            ("vocab_size", u64::from(self.vocab_size)),
            ("max_model_len", u64::from(self.max_model_len)),
            ("the packed step's words", self.slot_words_u64()),
        ];
        for (name, got) in limits {
            if got > i32::MAX as u64 {
                return Err(ConfigError::TooLarge { name, got });
            }
        }
        if self.num_speculative_tokens >= self.max_model_len {
            return Err(ConfigError::DraftsBeyondContext {
                num_speculative_tokens: self.num_speculative_tokens,
                max_model_len: self.max_model_len,
            });
        }
        if self.num_pages < self.max_pages_per_seq() {
            return Err(ConfigError::TooFewPages {
                num_pages: self.num_pages,
                page_size: self.page_size,
                max_model_len: self.max_model_len,
                needed: self.max_pages_per_seq(),
            });
        }
        match self
            .eos_token_ids
            .iter()
            .find(|&&id| id < 0 || id as u32 >= self.vocab_size)
        {
            Some(&id) => Err(ConfigError::EosOutOfRange {
                id,
                vocab_size: self.vocab_size,
            }),
            None => Ok(()),
        }
    }

    /// Pages of one sequence of `max_model_len` tokens: the width of a page-table row.
    pub fn max_pages_per_seq(&self) -> u32 {
        self.max_model_len.div_ceil(self.page_size)
    }

    /// Requests that run at once: each gets at least one token of every step's budget.
    pub fn max_running(&self) -> u32 {
        self.max_num_seqs.min(self.max_num_batched_tokens)
    }

    /// Positions beyond a row's own tokens that a drafter writes: draft models ingest one position later.
    pub fn extra_positions(&self) -> u32 {
        u32::from(self.num_speculative_tokens > 0)
    }

    /// Most pages one running request can take in a step after its admission.
    pub fn max_growth_pages(&self) -> u32 {
        (self.num_speculative_tokens + 2).div_ceil(self.page_size) + 1
    }

    /// Most page-table entries that admissions write in one step; one sequence of full length always fits.
    pub fn max_admission_pages(&self) -> u64 {
        u64::from(self.max_pages_per_seq()) + u64::from(self.num_pages).min(MAX_ADMISSION_PAGES)
    }

    /// Words of one packed step at most: no plan needs more.
    pub fn slot_words(&self) -> usize {
        self.slot_words_u64() as usize
    }

    fn slot_words_u64(&self) -> u64 {
        let running = u64::from(self.max_running());
        packed_batch::num_words(&Counts {
            num_reqs: running,
            num_tokens: u64::from(self.max_num_batched_tokens),
            num_sample_rows: u64::from(self.max_num_batched_tokens),
            num_new_pages: running * u64::from(self.max_growth_pages())
                + self.max_admission_pages(),
            num_admitted: running,
        })
    }
}

fn at_least(name: &'static str, got: u32, least: u32) -> Result<(), ConfigError> {
    if got < least {
        return Err(ConfigError::TooSmall { name, got, least });
    }
    Ok(())
}
