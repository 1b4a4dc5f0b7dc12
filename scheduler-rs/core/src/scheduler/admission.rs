//! Admission: waiting requests enter slots in order of rank, with pages for all their tokens at once.
//!
//! The head of the queue is never overtaken. It enters when there is a slot, a token of this step's budget, and pages
//! for all its tokens while every running request can still grow by one. Where that takes room from requests of a
//! strictly worse priority, they are preempted for it, the last one first.

use super::{Admitted, NewPage, Scheduler};
use crate::ids::{PageId, RequestKey};
use crate::request::Rank;
use std::collections::{HashMap, HashSet};

/// Prefill tokens of the running requests that rank before a candidate. Candidates come in order of rank, so one
/// pass over `running` serves them all.
#[derive(Default)]
struct Ahead {
    cursor: usize,
    num_tokens: u32,
}

/// A waiting request that could be next.
struct Candidate {
    key: RequestKey,
    rank: Rank,
    /// Pages for all its tokens and what the drafter writes beyond them.
    num_pages: usize,
    /// Tokens of the budget that prefills before it take.
    num_tokens_ahead: u32,
}

/// The running requests that a candidate would be admitted beside.
#[derive(Clone, Copy)]
struct Company {
    num_running: usize,
    num_decoding: u32,
    /// Pages to be had beside the free and idle ones.
    num_reclaimable: usize,
}

impl Scheduler {
    pub(super) fn admit_waiting(&mut self) {
        if self.waiting.is_empty() {
            return;
        }
        let mut pages_left = self.config.max_admission_pages();
        let mut ahead = Ahead::default();
        let mut num_decoding = self.count_decoding(self.running.len());
        while let Some(&(rank, key)) = self.waiting.first() {
            self.pass(&mut ahead, rank);
            let num_pages = self.pages_for(self.request(key).len() + self.config.extra_positions());
            let candidate = Candidate {
                key,
                rank,
                num_pages,
                num_tokens_ahead: ahead.num_tokens,
            };
            if num_pages as u64 > pages_left || !self.make_room(&candidate, &mut num_decoding) {
                return;
            }
            pages_left -= num_pages as u64;
            self.enter(key, num_pages, ahead.cursor);
        }
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

    /// Whether there is room for a candidate, preempting requests of worse priority if that makes it. Leaves the
    /// candidate's cached prefix in `found`.
    fn make_room(&mut self, candidate: &Candidate, num_decoding: &mut u32) -> bool {
        let num_running = self.running.len();
        let num_staying = self
            .running
            .partition_point(|&key| self.request(key).rank.priority <= candidate.rank.priority);
        if num_staying == num_running && !self.has_place(candidate, num_running, *num_decoding) {
            return false;
        }
        self.find_prefix(candidate.key);
        let company = Company {
            num_running,
            num_decoding: *num_decoding,
            num_reclaimable: 0,
        };
        if self.fits(candidate, company) {
            return true;
        }
        if num_staying == num_running
            || !self.fits(candidate, self.company_after_preempting(num_staying))
        {
            return false;
        }
        loop {
            self.preempt_last();
            let num_running = self.running.len();
            *num_decoding = self.count_decoding(num_running);
            let company = Company {
                num_running,
                num_decoding: *num_decoding,
                num_reclaimable: 0,
            };
            if self.fits(candidate, company) {
                return true;
            }
            if num_running <= num_staying {
                return false;
            }
        }
    }

    fn find_prefix(&mut self, key: RequestKey) {
        let request = self.requests[key.index()]
            .as_mut()
            .expect("keys of live requests only");
        let cold = &mut *request.cold;
        self.cache.find(
            &mut cold.chain,
            cold.cache_salt.as_deref(),
            &request.tokens,
            &mut self.found,
        );
    }

    fn count_decoding(&self, num_running: usize) -> u32 {
        self.running[..num_running]
            .iter()
            .filter(|&&key| self.request(key).is_decoding)
            .count() as u32
    }

    /// What remains when all but the first `num_staying` running requests are preempted.
    fn company_after_preempting(&self, num_staying: usize) -> Company {
        let pool = self.cache.pool();
        let found: HashSet<PageId> = self.found.iter().copied().collect();
        let mut num_shares: HashMap<PageId, u32> = HashMap::new();
        let mut num_reclaimable = 0;
        for &key in &self.running[num_staying..] {
            for id in self
                .request(key)
                .pages
                .iter()
                .map(|page| page.id())
                .filter(|id| !found.contains(id))
            {
                let num_held = num_shares.entry(id).or_default();
                *num_held += 1;
                num_reclaimable += usize::from(*num_held == pool.ref_count(id));
            }
        }
        Company {
            num_running: num_staying,
            num_decoding: self.count_decoding(num_staying),
            num_reclaimable,
        }
    }

    /// Whether a slot and a token of the budget are there.
    fn has_place(&self, candidate: &Candidate, num_running: usize, num_decoding: u32) -> bool {
        num_running < self.config.max_running() as usize
            && num_decoding.saturating_add(candidate.num_tokens_ahead)
                < self.config.max_num_batched_tokens
    }

    /// Whether a slot, a token of the budget, and pages are there: the candidate's, less the found prefix, and one
    /// for each request that runs beside it.
    fn fits(&self, candidate: &Candidate, company: Company) -> bool {
        let pool = self.cache.pool();
        let num_idle_found = self
            .found
            .iter()
            .filter(|&&id| pool.ref_count(id) == 0)
            .count();
        let num_taken = candidate.num_pages - self.found.len() + num_idle_found;
        let num_available = self.cache.num_available() as usize + company.num_reclaimable;
        self.has_place(candidate, company.num_running, company.num_decoding)
            && num_taken + company.num_running <= num_available
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
        request.reserve(&self.config);
        for &id in &self.found {
            request.pages.extend(self.cache.share(id));
        }
        request.num_full_pages = request.pages.len() as u32;
        request.num_computed_tokens = request.num_full_pages * self.config.page_size;
        while request.pages.len() < num_pages
            && let Some(page) = self.cache.allocate()
        {
            request.pages.push(page);
        }
        debug_assert_eq!(request.pages.len(), num_pages, "make_room has seen to it");
        request.find_open_places(self.config.page_size);
        let entries = request.pages.iter().zip(0..);
        self.building
            .new_pages
            .extend(entries.map(|(page, index)| NewPage {
                slot,
                index,
                page: page.id(),
            }));
        let is_first = !std::mem::replace(&mut request.cold.was_admitted, true);
        let first_lookup = is_first.then_some((request.len(), request.num_computed_tokens));
        if let Some((queries, hits)) = first_lookup {
            request.num_cached_tokens = hits;
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
