//! Pages of running requests: growth, and preemption when there are none left.
//!
//! Running requests are served in order of rank and the last one is preempted, so the first one is never preempted
//! while another runs. Alone it can have every page, and the configuration promises that a full sequence fits: the
//! oldest request of the best priority always advances.

use super::{NewPage, Scheduler};
use crate::ids::RequestKey;

impl Scheduler {
    /// Pages that hold `positions` positions, which end at the context limit.
    pub(crate) fn pages_for(&self, positions: u32) -> usize {
        positions
            .min(self.config.max_model_len)
            .div_ceil(self.config.page_size) as usize
    }

    /// Gives every decoding request pages for one token, and for what the drafter writes beyond it.
    pub(super) fn grow_decoding(&mut self) {
        let extra = self.config.extra_positions();
        let mut i = 0;
        while i < self.running.len() {
            let key = self.running[i];
            let request = self.request(key);
            if request.is_decoding {
                let needed = self.pages_for(request.num_computed_tokens + 1 + extra);
                while self.request(key).pages.len() < needed {
                    if self.extend(key) {
                        continue;
                    }
                    self.preempt_last();
                    if self.running.len() <= i {
                        return;
                    }
                }
            }
            i += 1;
        }
    }

    /// One more page for a running request; false when there is none.
    pub(super) fn extend(&mut self, key: RequestKey) -> bool {
        let Some(page) = self.cache.allocate() else {
            return false;
        };
        let request = self.requests[key.index()]
            .as_mut()
            .expect("keys of live requests only");
        let slot = request.slot.expect("only running requests grow");
        let index = request.pages.len() as u32;
        self.building.new_pages.push(NewPage {
            slot,
            index,
            page: page.id(),
        });
        request.pages.push(page);
        true
    }

    /// Sends the last running request back to wait; it will be computed again, with the prefix cache's help.
    pub(super) fn preempt_last(&mut self) {
        let Some(&key) = self.running.last() else {
            return;
        };
        let slot = self.request(key).slot;
        self.leave_slot(key);
        self.request_mut(key).num_preemptions += 1;
        self.num_preemptions += 1;
        self.building.new_pages.retain(|new| Some(new.slot) != slot);
    }

    /// Moves a running request to the waiting queue, without slot and pages.
    pub(super) fn leave_slot(&mut self, key: RequestKey) {
        self.remove_running(key);
        self.release_slot(key);
        let request = self.request(key);
        self.enqueue(key, request.rank, request.len());
    }

    /// Gives back a request's pages and slot.
    pub(super) fn release_slot(&mut self, key: RequestKey) {
        let (cache, request, _) = self.parts(key);
        cache.release_from(&mut request.pages, 0);
        request.num_table_pages = 0;
        request.num_computed_tokens = 0;
        request.is_decoding = false;
        if let Some(slot) = request.slot.take() {
            self.free_slots.push(slot);
        }
    }

    /// Takes a request out of the running ones.
    pub(super) fn remove_running(&mut self, key: RequestKey) {
        let rank = self.request(key).rank;
        if let Ok(at) = self
            .running
            .binary_search_by_key(&rank, |&key| self.request(key).rank)
        {
            self.running.remove(at);
        }
    }
}
