//! Pages of running requests: growth, and preemption when there are none left.
//!
//! Running requests are served in order of rank and the last one is preempted, so the first one is never preempted
//! while another runs. Alone it can have every page, and the configuration promises that a full sequence fits: the
//! oldest request of the best priority always advances.

use super::{NewPage, Scheduler};
use crate::ids::RequestKey;
use crate::request::Request;

impl Scheduler {
    /// Pages that hold `positions` positions, which end at the context limit.
    pub(crate) fn pages_for(&self, positions: u32) -> usize {
        positions
            .min(self.config.max_model_len)
            .div_ceil(self.config.page_size) as usize
    }

    /// Gives every decoding request pages for one token, and for what the drafter writes beyond it.
    pub(super) fn grow_decoding(&mut self) {
        let num_beyond = 1 + self.config.extra_positions();
        let mut i = 0;
        while let Some(&key) = self.running.get(i) {
            let request = self.request(key);
            if request.is_decoding
                && self.lacks_pages(request, request.num_computed_tokens + num_beyond)
            {
                match self.grow(key) {
                    Some(new_page) => self.building.new_pages.push(new_page),
                    None => self.preempt_last(),
                }
            } else {
                i += 1;
            }
        }
    }

    /// Whether a request's pages do not hold `positions` positions, which end at the context limit.
    pub(super) fn lacks_pages(&self, request: &Request, positions: u32) -> bool {
        positions.min(self.config.max_model_len)
            > request.pages.len() as u32 * self.config.page_size
    }

    /// One more page for a running request; None when there is none.
    pub(super) fn grow(&mut self, key: RequestKey) -> Option<NewPage> {
        let page = self.cache.allocate()?;
        let page_size = self.config.page_size;
        let request = self.request_mut(key);
        let slot = request.slot.expect("only running requests grow");
        let new_page = NewPage {
            slot,
            index: request.pages.len() as u32,
            page: page.id(),
        };
        let num_open = request.pages.len() - request.num_full_pages as usize;
        if let Some(place) = request.open_places.get_mut(num_open) {
            *place = page.id().0 * page_size;
        }
        request.pages.push(page);
        Some(new_page)
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
        request.num_computed_tokens = 0;
        request.num_full_pages = 0;
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
