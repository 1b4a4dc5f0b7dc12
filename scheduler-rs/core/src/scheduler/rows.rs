//! Rows of a step under the token budget: decode rows, then prefill chunks, then drafts.

use super::{Row, Scheduler};
use crate::request::Request;

impl Scheduler {
    /// One row of one token for each decoding request, then chunks of the others in order of rank.
    pub(super) fn make_rows(&mut self) {
        let mut step = std::mem::take(&mut self.building);
        let mut left = self.config.max_num_batched_tokens;
        for &key in &self.running {
            let request = self.request(key);
            if request.is_decoding
                && let Some(slot) = request.slot
            {
                step.rows.push(Row {
                    key,
                    slot,
                    num_tokens: 1,
                    num_drafts: 0,
                    samples: true,
                });
                left -= 1;
            }
        }
        step.num_decode_reqs = step.rows.len();
        if step.num_decode_reqs < self.running.len() {
            for &key in &self.running {
                let request = self.request(key);
                let num_tokens = request.num_uncomputed_tokens().min(left);
                if !request.is_decoding
                    && num_tokens > 0
                    && let Some(slot) = request.slot
                {
                    let samples = num_tokens == request.num_uncomputed_tokens();
                    step.rows.push(Row {
                        key,
                        slot,
                        num_tokens,
                        num_drafts: 0,
                        samples,
                    });
                    left -= num_tokens;
                }
            }
        }
        step.num_tokens = self.config.max_num_batched_tokens - left;
        step.num_decode_tokens = step.num_decode_reqs as u32;
        step.num_sampling_reqs = step.rows.iter().filter(|row| row.samples).count() as u32;
        step.num_sample_rows = step.num_sampling_reqs;
        step.num_draft_tokens = 0;
        self.building = step;
    }

    /// Adds drafts to the decode rows, within the limits of each request, the token budget, and the pages that are
    /// there: nobody is preempted for a draft.
    pub(super) fn grant_drafts(&mut self, draft_lens: &[i32]) {
        let mut step = std::mem::take(&mut self.building);
        let is_mixed = step.num_decode_reqs < step.rows.len();
        let allowed = self.config.num_speculative_tokens > 0
            && !draft_lens.is_empty()
            && (!is_mixed || self.config.speculate_in_mixed_batches);
        if allowed {
            let mut num_wanted = 0;
            for row in &mut step.rows[..step.num_decode_reqs] {
                row.num_drafts = self
                    .request(row.key)
                    .draft_limit()
                    .min(draft_lens[row.slot.0 as usize] as u32);
                num_wanted += row.num_drafts;
            }
            let left = self.config.max_num_batched_tokens - step.num_tokens;
            if num_wanted > left {
                share_out(&mut step.rows[..step.num_decode_reqs], left);
            }
        }
        self.building = step;
        if allowed {
            self.take_draft_pages();
        }
    }

    /// Takes pages for the wanted drafts, cuts drafts that have none, and counts the rest into the step.
    fn take_draft_pages(&mut self) {
        let extra = self.config.extra_positions();
        let mut num_drafts = 0;
        for i in 0..self.building.num_decode_reqs {
            let Row {
                key,
                num_drafts: wanted,
                ..
            } = self.building.rows[i];
            let request = self.request(key);
            let first = request.num_computed_tokens + 1;
            let needed = self.pages_for(first + wanted + extra);
            let mut granted = wanted;
            if request.pages.len() < needed {
                while self.request(key).pages.len() < needed && self.extend(key) {}
                granted = wanted.min(self.num_draft_positions(self.request(key), extra));
            }
            let row = &mut self.building.rows[i];
            row.num_drafts = granted;
            row.num_tokens = 1 + granted;
            num_drafts += granted;
        }
        self.building.num_draft_tokens = num_drafts;
        self.building.num_tokens += num_drafts;
        self.building.num_decode_tokens += num_drafts;
        self.building.num_sample_rows += num_drafts;
    }

    /// Drafts that a request's pages hold beside its next token and what the drafter writes beyond it.
    fn num_draft_positions(&self, request: &Request, extra: u32) -> u32 {
        if request.pages.len() == self.config.max_pages_per_seq() as usize {
            return u32::MAX;
        }
        let num_positions = request.pages.len() as u32 * self.config.page_size;
        num_positions.saturating_sub(request.num_computed_tokens + 1 + extra)
    }
}

/// Cuts the rows' drafts to `left` in all: every row keeps as many as the same cap allows, the first ones one more.
fn share_out(rows: &mut [Row], left: u32) {
    let sum = |rows: &[Row], cap: u32| rows.iter().map(|row| row.num_drafts.min(cap)).sum::<u32>();
    let mut cap = 0;
    while sum(rows, cap + 1) <= left {
        cap += 1;
    }
    let mut spare = left - sum(rows, cap);
    for row in rows {
        let keeps_one_more = row.num_drafts > cap && spare > 0;
        spare -= u32::from(keeps_one_more);
        row.num_drafts = row.num_drafts.min(cap + u32::from(keeps_one_more));
    }
}
