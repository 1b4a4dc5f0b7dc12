//! Rows of a step under the token budget: decode rows, then prefill chunks, then drafts.

use super::{NewPage, PlannedStep, Row, Scheduler};
use crate::request::Request;

impl Scheduler {
    /// One row of one token for each decoding request, with the drafts it wants, then chunks of the others in order
    /// of rank. `draft_lens` is by slot; empty: none.
    pub(super) fn make_rows(&mut self, draft_lens: &[i32]) {
        let mut step = std::mem::take(&mut self.building);
        // Over the rows of an earlier step: one that is pushed would be built elsewhere and copied.
        step.rows.resize(self.running.len(), Row::default());
        let mut num_rows = 0;
        for &key in &self.running {
            let request = self.request(key);
            if request.is_decoding
                && let Some(slot) = request.slot
            {
                let most = draft_lens
                    .get(slot.0 as usize)
                    .map_or(0, |&most| most as u32);
                let row = &mut step.rows[num_rows];
                row.set(key, slot, request, 1);
                row.num_drafts = request.draft_limit().min(most);
                row.most_drafts_in_pages = self.most_drafts_in_pages(request);
                num_rows += 1;
            }
        }
        step.rows.truncate(num_rows);
        step.num_decode_reqs = step.rows.len();
        step.num_decode_tokens = step.rows.len() as u32;
        step.num_sampling_reqs = step.num_decode_tokens;
        step.num_tokens = step.num_decode_tokens;
        if step.rows.len() < self.running.len() {
            self.make_prefill_rows(&mut step);
        }
        step.num_sample_rows = step.num_sampling_reqs;
        self.building = step;
    }

    fn make_prefill_rows(&self, step: &mut PlannedStep) {
        for &key in &self.running {
            let request = self.request(key);
            let num_uncomputed = request.num_uncomputed_tokens();
            let num_tokens =
                num_uncomputed.min(self.config.max_num_batched_tokens - step.num_tokens);
            if !request.is_decoding
                && num_tokens > 0
                && let Some(slot) = request.slot
            {
                let mut row = Row::default();
                row.set(key, slot, request, num_tokens);
                step.num_sampling_reqs += u32::from(row.samples);
                step.rows.push(row);
                step.num_tokens += num_tokens;
            }
        }
    }

    /// Grants the drafts that the decode rows want, within the token budget and the pages that are there: nobody is
    /// preempted for a draft.
    pub(super) fn grant_drafts(&mut self) {
        let mut step = std::mem::take(&mut self.building);
        let is_mixed = step.num_decode_reqs < step.rows.len();
        let length = self.choose_length(&mut step.rows[..step.num_decode_reqs], is_mixed);
        let rows = &mut step.rows[..step.num_decode_reqs];
        let mut left = self.config.max_num_batched_tokens - step.num_tokens;
        if is_mixed && !self.config.speculate_in_mixed_batches {
            left = 0;
        }
        if rows.iter().map(|row| row.num_drafts).sum::<u32>() > left {
            share_out(rows, left);
        }
        let mut num_drafts = 0;
        for row in rows {
            if row.num_drafts > row.most_drafts_in_pages {
                row.num_drafts = self.take_draft_pages(row, &mut step.new_pages);
            }
            row.num_tokens += row.num_drafts;
            num_drafts += row.num_drafts;
        }
        if let Some(policy) = &mut self.draft_policy
            && !is_mixed
            && step.num_decode_reqs > 0
        {
            policy.planned(step.num_decode_reqs as u32, length, num_drafts);
        }
        step.num_draft_tokens = num_drafts;
        step.num_tokens += num_drafts;
        step.num_decode_tokens += num_drafts;
        step.num_sample_rows += num_drafts;
        self.building = step;
    }

    /// Cuts the rows' drafts to the length that the policy chooses, if there is one. Returns that length.
    fn choose_length(&mut self, rows: &mut [Row], is_mixed: bool) -> u32 {
        let Some(policy) = &mut self.draft_policy else {
            return self.config.num_speculative_tokens;
        };
        let length = if is_mixed {
            policy.skip();
            policy.length()
        } else {
            count_wanted(rows, self.config.num_speculative_tokens, &mut self.wanted);
            policy.choose(rows.len() as u32, &self.wanted)
        };
        for row in rows {
            row.num_drafts = row.num_drafts.min(length);
        }
        length
    }

    /// Takes pages for a row's drafts while there are any. Returns how many drafts they hold.
    fn take_draft_pages(&mut self, row: &mut Row, new_pages: &mut Vec<NewPage>) -> u32 {
        let num_beyond = 1 + self.config.extra_positions();
        let positions = self.request(row.key).num_computed_tokens + num_beyond + row.num_drafts;
        while self.lacks_pages(self.request(row.key), positions)
            && let Some(new_page) = self.grow(row.key)
        {
            new_pages.push(new_page);
        }
        let request = self.request(row.key);
        row.open_places = request.open_places;
        row.num_drafts.min(self.most_drafts_in_pages(request))
    }

    /// Drafts that a request's pages hold beside its next token and what the drafter writes beyond them.
    fn most_drafts_in_pages(&self, request: &Request) -> u32 {
        let num_positions = request.pages.len() as u32 * self.config.page_size;
        if num_positions >= self.config.max_model_len {
            return u32::MAX;
        }
        num_positions
            .saturating_sub(request.num_computed_tokens + 1 + self.config.extra_positions())
    }
}

/// Writes how many rows can have more than j drafts, for j below `most`.
fn count_wanted(rows: &[Row], most: u32, wanted: &mut Vec<u32>) {
    wanted.clear();
    wanted.resize(most as usize + 1, 0);
    for row in rows {
        wanted[row.num_drafts.min(most) as usize] += 1;
    }
    wanted.remove(0);
    for j in (1..wanted.len()).rev() {
        wanted[j - 1] += wanted[j];
    }
}

/// Cuts the rows' drafts to `left` in all: every row keeps as many as the same cap allows, the first ones one more.
fn share_out(rows: &mut [Row], left: u32) {
    let sum = |rows: &[Row], cap: u32| rows.iter().map(|row| row.num_drafts.min(cap)).sum::<u32>();
    if left == 0 {
        rows.iter_mut().for_each(|row| row.num_drafts = 0);
        return;
    }
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
