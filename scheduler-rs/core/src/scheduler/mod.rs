//! Who runs in a step: submit, abort, plan, revert. Admission, growth and the making of rows are in the submodules;
//! what a step leaves behind is in [`crate::commit`].

mod admission;
mod growth;
mod inspect;
mod invariants;
mod planned_step;
mod rows;

pub use inspect::Stats;
pub use planned_step::PlannedStep;
pub(crate) use planned_step::{Admitted, NewPage, Row};

use crate::commit::{Events, FinishReason};
use crate::config::SchedulerConfig;
use crate::draft_policy::{CostError, CostPoint, DraftPolicy};
use crate::error::{ConfigError, PlanError, RequestError};
use crate::ids::{PageId, RequestId, RequestKey, Slot, StepId};
use crate::packed_batch;
use crate::prefix_cache::PrefixCache;
use crate::request::{Rank, Request, ValidRequest};
use std::collections::{BTreeSet, HashMap};

/// All requests, their pages, and the step in flight.
#[derive(Debug)]
pub struct Scheduler {
    pub(crate) config: SchedulerConfig,
    pub(crate) cache: PrefixCache,
    requests: Vec<Option<Request>>,
    free_keys: Vec<RequestKey>,
    by_id: HashMap<RequestId, RequestKey>,
    waiting: BTreeSet<(Rank, RequestKey)>,
    /// In order of rank, so that the last one is the next to be preempted.
    pub(crate) running: Vec<RequestKey>,
    free_slots: Vec<Slot>,
    next_arrival: u64,
    last_step: u64,
    pub(crate) in_flight: Option<StepId>,
    pub(crate) num_aborted_in_flight: usize,
    /// Final events of requests that ended outside a commit.
    pub(crate) ended: Events,
    /// The step under construction; its vectors are used again.
    building: PlannedStep,
    found: Vec<PageId>,
    prefix_queries: u64,
    prefix_hits: u64,
    num_preemptions: u64,
    waiting_tokens: u64,
    /// None: as many drafts as there are.
    pub(crate) draft_policy: Option<DraftPolicy>,
    /// Rows that can have more than j drafts, for the policy.
    wanted: Vec<u32>,
}

impl Scheduler {
    /// An idle scheduler.
    ///
    /// # Errors
    /// See [`SchedulerConfig::validate`].
    pub fn new(config: SchedulerConfig) -> Result<Self, ConfigError> {
        config.validate()?;
        Ok(Self {
            cache: PrefixCache::new(&config),
            requests: Vec::new(),
            free_keys: Vec::new(),
            by_id: HashMap::new(),
            waiting: BTreeSet::new(),
            running: Vec::new(),
            free_slots: (0..config.max_num_seqs).rev().map(Slot).collect(),
            next_arrival: 0,
            last_step: 0,
            in_flight: None,
            num_aborted_in_flight: 0,
            ended: Events::default(),
            building: PlannedStep::default(),
            found: Vec::new(),
            prefix_queries: 0,
            prefix_hits: 0,
            num_preemptions: 0,
            waiting_tokens: 0,
            draft_policy: None,
            wanted: Vec::new(),
            config,
        })
    }

    /// The configuration.
    pub fn config(&self) -> &SchedulerConfig {
        &self.config
    }

    /// From now on drafts are as many as pay, by acceptance and by what steps cost, `points` to begin with. Counters of
    /// requests start anew.
    ///
    /// # Errors
    /// See [`CostError`].
    pub fn adapt_draft_length(&mut self, points: &[CostPoint]) -> Result<(), CostError> {
        let config = &self.config;
        let most = config.num_speculative_tokens;
        self.draft_policy = Some(DraftPolicy::new(points, config.max_num_seqs, most)?);
        (self.prefix_queries, self.prefix_hits, self.num_preemptions) = (0, 0, 0);
        Ok(())
    }

    /// Puts a request into the waiting queue.
    ///
    /// # Errors
    /// The id is in use, or the queue is full.
    pub fn submit(&mut self, request: ValidRequest) -> Result<(), RequestError> {
        if self.waiting.len() >= self.config.max_waiting as usize {
            return Err(RequestError::QueueFull {
                num_waiting: self.waiting.len(),
                max_waiting: self.config.max_waiting,
            });
        }
        self.submit_unbounded(request)
    }

    /// As [`Self::submit`] for a caller that has checked the queue's limit already.
    ///
    /// # Errors
    /// The id is in use.
    pub fn submit_unbounded(&mut self, request: ValidRequest) -> Result<(), RequestError> {
        let id = request.id();
        if self.by_id.contains_key(&id) {
            return Err(RequestError::DuplicateId { id: id.0 });
        }
        let request = Request::new(request, self.next_arrival, &self.config);
        self.next_arrival += 1;
        let key = self.free_keys.pop().unwrap_or_else(|| {
            self.requests.push(None);
            RequestKey(self.requests.len() as u32 - 1)
        });
        self.by_id.insert(id, key);
        self.enqueue(key, request.rank, request.len());
        self.requests[key.index()] = Some(request);
        Ok(())
    }

    /// Ends a request at any moment; an unknown id is ignored. Its one final event comes with the commit of the step
    /// in flight when it runs there, else with [`Self::take_ended`] or the next commit.
    pub fn abort(&mut self, id: RequestId) {
        let Some(&key) = self.by_id.get(&id) else {
            return;
        };
        let in_flight = self.in_flight.is_some();
        let request = self.request_mut(key);
        if in_flight && request.slot.is_some() {
            if !std::mem::replace(&mut request.is_aborted, true) {
                self.num_aborted_in_flight += 1;
            }
        } else {
            self.end_by_abort(key);
        }
    }

    /// Plans the next step and writes it into `out`. None: nothing can run.
    ///
    /// `draft_lens` is the most drafts each slot can take, `[max_num_seqs]`; None: no drafts.
    ///
    /// # Errors
    /// A step is in flight, or an argument has the wrong size. Nothing has changed then.
    pub fn plan(
        &mut self,
        draft_lens: Option<&[i32]>,
        out: &mut [i32],
    ) -> Result<Option<PlannedStep>, PlanError> {
        let expected = self.config.slot_words();
        if out.len() < expected {
            return Err(PlanError::BufferTooSmall {
                got: out.len(),
                expected,
            });
        }
        let step = self.prepare(draft_lens)?;
        if let Some(step) = &step {
            self.pack(step, out);
        }
        Ok(step)
    }

    /// The first half of [`Self::plan`]: admission, pages, rows.
    ///
    /// # Errors
    /// As [`Self::plan`].
    pub fn prepare(
        &mut self,
        draft_lens: Option<&[i32]>,
    ) -> Result<Option<PlannedStep>, PlanError> {
        if let Some(step) = self.in_flight {
            return Err(PlanError::StepInFlight { step });
        }
        self.check_draft_lens(draft_lens)?;
        self.building.clear();
        self.grow_decoding();
        self.admit_waiting();
        self.make_rows(draft_lens.unwrap_or_default());
        self.grant_drafts();
        if self.building.rows.is_empty() {
            return Ok(None);
        }
        self.last_step += 1;
        let mut step = std::mem::take(&mut self.building);
        step.id = self.last_step;
        self.in_flight = Some(step.id());
        debug_assert_eq!(self.check_invariants(), Ok(()));
        Ok(Some(step))
    }

    /// The second half of [`Self::plan`]: `out` holds at least [`SchedulerConfig::slot_words`] words.
    pub fn pack(&self, step: &PlannedStep, out: &mut [i32]) {
        packed_batch::pack(
            step,
            self.config.page_size,
            |row| self.request(row.key),
            out,
        );
    }

    /// Undoes a step that did not run: its new pages are free again, requests it admitted wait again. What it
    /// preempted stays preempted.
    pub fn revert(&mut self, step: PlannedStep) {
        if self.in_flight != Some(step.id()) {
            return;
        }
        self.in_flight = None;
        if let Some(policy) = &mut self.draft_policy {
            policy.skip();
        }
        for admitted in &step.admitted {
            if let Some((queries, hits)) = admitted.first_lookup {
                self.prefix_queries -= u64::from(queries);
                self.prefix_hits -= u64::from(hits);
                let request = self.request_mut(admitted.key);
                request.num_cached_tokens = 0;
                request.cold.was_admitted = false;
            }
            self.leave_slot(admitted.key);
        }
        self.take_back_growth(&step);
        self.end_aborted();
        self.recycle(step);
        debug_assert_eq!(self.check_invariants(), Ok(()));
    }

    /// Gives back the pages by which running requests grew for a step; its admissions have left already.
    fn take_back_growth(&mut self, step: &PlannedStep) {
        let by_slot: HashMap<Option<Slot>, RequestKey> = self
            .running
            .iter()
            .map(|&key| (self.request(key).slot, key))
            .collect();
        for new in step.new_pages.iter().rev() {
            if let Some(&key) = by_slot.get(&Some(new.slot)) {
                let (cache, request, _) = self.parts(key);
                cache.release_from(&mut request.pages, new.index as usize);
            }
        }
    }

    /// Moves the final events of requests that ended outside a commit to the end of `events`.
    pub fn take_ended(&mut self, events: &mut Events) {
        events.append(&mut self.ended);
    }

    /// Forgets all cached prefixes. Returns whether every page is free now, that is, no request holds any.
    pub fn reset_prefix_cache(&mut self) -> bool {
        self.cache.reset();
        self.cache.pool().num_free() == self.config.num_pages
    }

    pub(crate) fn request(&self, key: RequestKey) -> &Request {
        self.requests[key.index()]
            .as_ref()
            .expect("keys of live requests only")
    }

    pub(crate) fn request_mut(&mut self, key: RequestKey) -> &mut Request {
        self.requests[key.index()]
            .as_mut()
            .expect("keys of live requests only")
    }

    /// The cache, a live request and the configuration, borrowed apart.
    pub(crate) fn parts(
        &mut self,
        key: RequestKey,
    ) -> (&mut PrefixCache, &mut Request, &SchedulerConfig) {
        let request = self.requests[key.index()]
            .as_mut()
            .expect("keys of live requests only");
        (&mut self.cache, request, &self.config)
    }

    /// Enters the pages that a commit has filled into the prefix cache.
    pub(crate) fn insert_filled(&mut self) {
        let requests = &mut self.requests;
        self.cache.insert_filled(|key, hash| {
            let request = requests[key.index()]
                .as_mut()
                .expect("requests end after their pages are entered");
            request.cold.chain.push(hash);
        });
    }

    /// Removes a request and gives back all it holds. Its final event is the caller's to write.
    pub(crate) fn end(&mut self, key: RequestKey) {
        let request = self.request(key);
        let (id, rank, len, runs) = (
            request.id,
            request.rank,
            request.len(),
            request.slot.is_some(),
        );
        if runs {
            self.remove_running(key);
            self.release_slot(key);
        } else {
            self.waiting.remove(&(rank, key));
            self.waiting_tokens -= u64::from(len);
        }
        self.by_id.remove(&id);
        self.requests[key.index()] = None;
        self.free_keys.push(key);
    }

    /// Ends the running requests that were aborted while a step was in flight, with events of their own.
    pub(crate) fn end_aborted(&mut self) {
        if self.num_aborted_in_flight == 0 {
            return;
        }
        self.num_aborted_in_flight = 0;
        let live = self
            .running
            .iter()
            .copied()
            .chain(self.waiting.iter().map(|&(_, key)| key));
        let aborted: Vec<RequestKey> = live.filter(|&key| self.request(key).is_aborted).collect();
        for key in aborted {
            self.end_by_abort(key);
        }
    }

    /// Takes the vectors of a step that is over.
    pub(crate) fn recycle(&mut self, step: PlannedStep) {
        self.building = step;
        self.building.clear();
    }

    fn end_by_abort(&mut self, key: RequestKey) {
        let request = self.requests[key.index()]
            .as_ref()
            .expect("keys of live requests only");
        self.ended.push_end(request, FinishReason::Abort);
        self.end(key);
    }

    fn enqueue(&mut self, key: RequestKey, rank: Rank, len: u32) {
        self.waiting.insert((rank, key));
        self.waiting_tokens += u64::from(len);
    }

    fn check_draft_lens(&self, draft_lens: Option<&[i32]>) -> Result<(), PlanError> {
        let Some(lens) = draft_lens else {
            return Ok(());
        };
        if lens.len() != self.config.max_num_seqs as usize {
            return Err(PlanError::DraftLens {
                got: lens.len(),
                expected: self.config.max_num_seqs,
            });
        }
        match lens.iter().position(|&len| len < 0) {
            Some(slot) => Err(PlanError::NegativeDraftLen {
                slot,
                got: lens[slot],
            }),
            None => Ok(()),
        }
    }
}
