//! What must hold between any two operations. Tests and debug builds check all of it; it costs a pass over everything.

use super::Scheduler;
use crate::ids::{PageId, RequestKey};
use crate::request::Request;

/// Fails with a sentence unless the condition holds.
macro_rules! ensure {
    ($condition:expr, $($message:tt)+) => {
        if !$condition {
            return Err(format!($($message)+));
        }
    };
}

impl Scheduler {
    /// Checks every invariant.
    ///
    /// # Errors
    /// The first broken one, in words.
    pub fn check_invariants(&self) -> Result<(), String> {
        self.check_pages()?;
        self.check_queues()?;
        for &key in &self.running {
            self.check_running(self.request(key))?;
        }
        for &(rank, key) in &self.waiting {
            self.check_waiting(self.request(key))?;
            ensure!(
                self.request(key).rank == rank,
                "the queue holds another rank than the request"
            );
        }
        Ok(())
    }

    /// Free, idle and used pages are all pages; reference counts are what requests hold; an idle engine holds none.
    fn check_pages(&self) -> Result<(), String> {
        let pool = self.cache.pool();
        let mut owners = vec![0; pool.num_pages() as usize];
        for request in self.requests.iter().flatten() {
            for page in &request.pages {
                owners[page.id().0 as usize] += 1;
            }
        }
        for (id, &count) in (0..).map(PageId).zip(&owners) {
            let held = pool.ref_count(id);
            ensure!(
                held == count,
                "page {} counts {held} references, requests hold {count}",
                id.0
            );
        }
        let num_used = owners.iter().filter(|&&count| count > 0).count() as u32;
        let (num_free, num_idle) = (pool.num_free(), pool.num_idle());
        ensure!(
            num_free + num_idle + num_used == pool.num_pages(),
            "{num_free} free + {num_idle} cached + {num_used} used pages are not {}",
            pool.num_pages()
        );
        ensure!(
            pool.idle_pages().count() as u32 == num_idle,
            "the idle list does not hold {num_idle} pages"
        );
        ensure!(
            pool.idle_pages()
                .all(|id| pool.is_retained(id) && pool.ref_count(id) == 0),
            "an idle page has an owner or is not in the prefix index"
        );
        ensure!(
            pool.free_pages()
                .iter()
                .all(|&id| !pool.is_retained(id) && pool.ref_count(id) == 0),
            "a free page has an owner or is in the prefix index"
        );
        ensure!(
            self.cache.is_consistent(),
            "prefix index and page states disagree"
        );
        Ok(())
    }

    /// Every live request is either waiting or running, slots are held once, running ones are in order of rank.
    fn check_queues(&self) -> Result<(), String> {
        let num_live = self.requests.iter().flatten().count();
        ensure!(
            num_live == self.waiting.len() + self.running.len() && num_live == self.by_id.len(),
            "{num_live} live requests, but {} waiting, {} running, {} ids",
            self.waiting.len(),
            self.running.len(),
            self.by_id.len()
        );
        let rank = |key: &RequestKey| self.request(*key).rank;
        ensure!(
            self.running.is_sorted_by(|a, b| rank(a) < rank(b)),
            "running requests are out of order"
        );
        let mut slots: Vec<u32> = self.free_slots.iter().map(|slot| slot.0).collect();
        slots.extend(
            self.running
                .iter()
                .filter_map(|&key| self.request(key).slot)
                .map(|slot| slot.0),
        );
        slots.sort_unstable();
        ensure!(
            slots.iter().copied().eq(0..self.config.max_num_seqs),
            "slots are lost or held twice: {slots:?}"
        );
        let waiting_tokens: u64 = self
            .waiting
            .iter()
            .map(|&(_, key)| u64::from(self.request(key).len()))
            .sum();
        ensure!(
            waiting_tokens == self.waiting_tokens,
            "{waiting_tokens} waiting tokens, not {}",
            self.waiting_tokens
        );
        Ok(())
    }

    fn check_running(&self, request: &Request) -> Result<(), String> {
        let id = request.id.0;
        let num_computed = request.num_computed_tokens;
        ensure!(request.slot.is_some(), "request {id} runs without a slot");
        ensure!(
            num_computed < request.len(),
            "request {id} has computed more than its tokens"
        );
        ensure!(
            request.len() < request.max_len,
            "request {id} runs on at its limit"
        );
        ensure!(
            !request.is_decoding || num_computed + 1 == request.len(),
            "request {id} decodes with a gap"
        );
        ensure!(
            num_computed.div_ceil(self.config.page_size) as usize <= request.pages.len(),
            "request {id} has computed tokens without pages"
        );
        let num_full = (num_computed / self.config.page_size) as usize;
        let open = request
            .pages
            .iter()
            .skip(num_full)
            .map(|page| page.id().0 * self.config.page_size);
        ensure!(
            open.zip(request.open_places).all(|(a, b)| a == b),
            "request {id} has lost its open places"
        );
        ensure!(
            request.tokens.last() == Some(&request.last_token),
            "request {id} has lost its last token"
        );
        ensure!(
            request.num_full_pages as usize == num_full,
            "request {id} miscounts its full pages"
        );
        ensure!(
            request.pages[num_full..]
                .iter()
                .all(|page| !self.cache.pool().is_retained(page.id())),
            "a page of request {id} with uncommitted tokens is in the prefix index"
        );
        Ok(())
    }

    fn check_waiting(&self, request: &Request) -> Result<(), String> {
        let id = request.id.0;
        ensure!(
            request.slot.is_none() && request.pages.is_empty(),
            "request {id} waits with a slot or pages"
        );
        ensure!(
            request.num_computed_tokens == 0,
            "request {id} waits with computed tokens"
        );
        Ok(())
    }
}
