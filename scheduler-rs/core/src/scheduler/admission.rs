//! Admission: waiting requests enter slots in order of rank, with pages for all their tokens at once.
//!
//! The head of the queue is never overtaken. It enters when there is a slot, a token of this step's budget, and pages
//! for all its tokens while every running request can still grow by one. When it has a strictly better priority than
//! the last running request, that one is preempted for it.

use super::{Admitted, NewPage, Scheduler};
use crate::ids::RequestKey;
use crate::request::{Rank, Request};

/// Prefill tokens of the running requests that rank before a candidate. Candidates come in order of rank, so one
/// pass over `running` serves them all.
#[derive(Default)]
struct Ahead {
    cursor: usize,
    num_tokens: u32,
}

impl Scheduler {
    pub(super) fn admit_waiting(&mut self) {
        if self.waiting.is_empty() {
            return;
        }
        let mut pages_left = self.config.max_admission_pages();
        let mut ahead = Ahead::default();
        let mut num_decoding = self.num_decoding();
        while let Some(&(rank, key)) = self.waiting.first() {
            let num_preemptions = self.num_preemptions;
            self.pass(&mut ahead, rank);
            let num_pages = self.pages_for(self.request(key).len() + self.config.extra_positions());
            let is_budget_spent =
                num_decoding.saturating_add(ahead.num_tokens) >= self.config.max_num_batched_tokens;
            if is_budget_spent
                || num_pages as u64 > pages_left
                || !self.make_room(rank, key, num_pages)
            {
                return;
            }
            if self.num_preemptions != num_preemptions {
                num_decoding = self.num_decoding();
            }
            pages_left -= num_pages as u64;
            self.enter(key, num_pages, ahead.cursor);
        }
    }

    fn num_decoding(&self) -> u32 {
        self.running
            .iter()
            .filter(|&&key| self.request(key).is_decoding)
            .count() as u32
    }

    /// Moves the cursor to the first running request behind `rank`.
    fn pass(&self, ahead: &mut Ahead, rank: Rank) {
        while let Some(&key) = self.running.get(ahead.cursor)
            && self.request(key).rank < rank
        {
            let request = self.request(key);
            if !request.is_decoding {
                ahead.num_tokens = ahead
                    .num_tokens
                    .saturating_add(request.num_uncomputed_tokens());
            }
            ahead.cursor += 1;
        }
    }

    /// Whether there is a slot and pages for a candidate, preempting requests of worse priority if that helps. Leaves
    /// the candidate's cached prefix in `found`.
    fn make_room(&mut self, rank: Rank, key: RequestKey, num_pages: usize) -> bool {
        let max_running = self.config.max_running() as usize;
        let is_worse = |last: &Request| last.rank.priority > rank.priority;
        if self.running.len() >= max_running
            && !self
                .running
                .last()
                .is_some_and(|&key| is_worse(self.request(key)))
        {
            return false;
        }
        self.find_prefix(key);
        if !self.could_fit(rank, num_pages) {
            return false;
        }
        while self.running.len() >= max_running || !self.fits(num_pages, 0, self.running.len()) {
            match self.running.last() {
                Some(&last) if is_worse(self.request(last)) => self.preempt_last(),
                _ => return false,
            }
        }
        true
    }

    fn find_prefix(&mut self, key: RequestKey) {
        let request = self.requests[key.index()]
            .as_mut()
            .expect("keys of live requests only");
        let salt = request.cache_salt.as_deref();
        self.cache
            .find(&mut request.chain, salt, &request.tokens, &mut self.found);
    }

    /// Whether preempting every request of worse priority would make room for the pages.
    fn could_fit(&self, rank: Rank, num_pages: usize) -> bool {
        let pool = self.cache.pool();
        let (mut reclaimable, mut num_staying) = (0, self.running.len());
        for &key in self.running.iter().rev() {
            let request = self.request(key);
            if request.rank.priority <= rank.priority {
                break;
            }
            num_staying -= 1;
            reclaimable += request
                .pages
                .iter()
                .filter(|page| pool.ref_count(page.id()) == 1)
                .count();
        }
        self.fits(num_pages, reclaimable, num_staying)
    }

    /// Whether `num_pages` pages, less the found prefix, are there, and one more for each of `num_running` requests.
    fn fits(&self, num_pages: usize, reclaimable: usize, num_running: usize) -> bool {
        let pool = self.cache.pool();
        let num_idle_found = self
            .found
            .iter()
            .filter(|&&id| pool.ref_count(id) == 0)
            .count();
        let num_taken = num_pages - self.found.len() + num_idle_found;
        num_taken + num_running <= self.cache.num_available() as usize + reclaimable
    }

    /// Puts a waiting request into a slot, at place `at` of the running ones.
    fn enter(&mut self, key: RequestKey, num_pages: usize, at: usize) {
        let Some(slot) = self.free_slots.pop() else {
            return;
        };
        let request = self.requests[key.index()]
            .as_mut()
            .expect("keys of live requests only");
        self.waiting.remove(&(request.rank, key));
        self.waiting_tokens -= u64::from(request.len());
        for &id in &self.found {
            request.pages.extend(self.cache.share(id));
        }
        request.num_computed_tokens = request.pages.len() as u32 * self.config.page_size;
        while request.pages.len() < num_pages
            && let Some(page) = self.cache.allocate()
        {
            request.pages.push(page);
        }
        debug_assert_eq!(request.pages.len(), num_pages, "make_room has seen to it");
        let entries = request.pages.iter().zip(0..);
        self.building
            .new_pages
            .extend(entries.map(|(page, index)| NewPage {
                slot,
                index,
                page: page.id(),
            }));
        let first_lookup = request
            .num_cached_tokens
            .is_none()
            .then_some((request.len(), request.num_computed_tokens));
        if let Some((queries, hits)) = first_lookup {
            request.num_cached_tokens = Some(hits);
            self.prefix_queries += u64::from(queries);
            self.prefix_hits += u64::from(hits);
        }
        request.slot = Some(slot);
        self.building.admitted.push(Admitted {
            key,
            slot,
            id: request.id,
            first_lookup,
        });
        self.running.insert(at, key);
    }
}
