//! What can be asked of a scheduler without changing it.

use super::Scheduler;
use crate::draft_policy::DraftPolicy;
use crate::ids::{RequestId, Slot};

/// Counts of the present moment and since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Requests in slots.
    pub num_running: usize,
    /// Requests without a slot, preempted ones included.
    pub num_waiting: usize,
    /// Pages in all.
    pub num_pages: u32,
    /// Pages without owner and content.
    pub num_free_pages: u32,
    /// Pages without owner that the prefix cache still knows.
    pub num_cached_pages: u32,
    /// Tokens looked up in the prefix cache, at first admissions.
    pub prefix_queries: u64,
    /// Tokens found there.
    pub prefix_hits: u64,
    /// Preemptions so far.
    pub num_preemptions: u64,
    /// Tokens of the waiting requests.
    pub waiting_tokens: u64,
    /// Most drafts of a row now.
    pub draft_length: u32,
}

impl Scheduler {
    /// Whether final events wait for [`Self::take_ended`].
    pub fn has_ended(&self) -> bool {
        !self.ended.is_empty()
    }

    /// Whether any request lives.
    pub fn has_work(&self) -> bool {
        !self.by_id.is_empty()
    }

    /// Requests without a slot.
    pub fn num_waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Prompt and output tokens of a live request.
    pub fn request_tokens(&self, id: RequestId) -> Option<&[i32]> {
        self.by_id
            .get(&id)
            .map(|&key| self.request(key).tokens.as_slice())
    }

    /// Prompt tokens of a live request.
    pub fn num_prompt_tokens(&self, id: RequestId) -> Option<u32> {
        self.by_id
            .get(&id)
            .map(|&key| self.request(key).num_prompt_tokens)
    }

    /// The slot of a running request.
    pub fn slot_of(&self, id: RequestId) -> Option<Slot> {
        self.by_id.get(&id).and_then(|&key| self.request(key).slot)
    }

    /// Counts of this moment.
    pub fn stats(&self) -> Stats {
        let pool = self.cache.pool();
        Stats {
            num_running: self.running.len(),
            num_waiting: self.waiting.len(),
            num_pages: pool.num_pages(),
            num_free_pages: pool.num_free(),
            num_cached_pages: pool.num_idle(),
            prefix_queries: self.prefix_queries,
            prefix_hits: self.prefix_hits,
            num_preemptions: self.num_preemptions,
            waiting_tokens: self.waiting_tokens,
            draft_length: self
                .draft_policy
                .as_ref()
                .map_or(self.config.num_speculative_tokens, DraftPolicy::length),
        }
    }
}
