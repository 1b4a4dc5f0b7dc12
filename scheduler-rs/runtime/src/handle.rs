//! The scheduler behind a lock, for any thread: submit and abort go through the inbox, steps are known by their ids.

use crate::error::RuntimeError;
use crate::inbox::{Command, Inbox};
use crate::planner::Planner;
use crate::slots::{SlotMap, SlotWriter};
use parking_lot::Mutex;
use sonar_scheduler::{
    CostPoint, Events, NewRequest, PlannedStep, RequestId, Scheduler, SchedulerConfig, Stats,
    StepId, Verdict,
};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

#[derive(Debug)]
struct State {
    scheduler: Scheduler,
    planned: Option<PlannedStep>,
    writer: SlotWriter,
    commands: Vec<Command>,
    /// The message of the panic that ended the scheduler.
    dead: Option<String>,
}

/// What the planner thread and the callers share.
#[derive(Debug)]
pub(crate) struct Shared {
    config: SchedulerConfig,
    inbox: Inbox,
    state: Mutex<State>,
}

impl Shared {
    /// Plans into a slot; see [`SchedulerHandle::plan`].
    pub(crate) fn plan(
        &self,
        slot: usize,
        draft_lens: Option<&[i32]>,
    ) -> Result<Option<StepId>, RuntimeError> {
        self.with_state(|state| {
            self.drain(state);
            let step = state
                .scheduler
                .plan(draft_lens, state.writer.words(slot)?)?;
            self.inbox
                .settle(state.scheduler.num_waiting(), &Events::default());
            let id = step.as_ref().map(PlannedStep::id);
            if step.is_some() {
                state.planned = step;
            }
            Ok(id)
        })
    }

    /// Runs `f` under the lock. A panic in it is the end of the scheduler: it becomes an error now and later.
    fn with_state<R>(
        &self,
        f: impl FnOnce(&mut State) -> Result<R, RuntimeError>,
    ) -> Result<R, RuntimeError> {
        let mut state = self.state.lock();
        if let Some(message) = &state.dead {
            return Err(RuntimeError::Dead {
                message: message.clone(),
            });
        }
        catch_unwind(AssertUnwindSafe(|| f(&mut state))).unwrap_or_else(|panic| {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let message = text
                .or(panic.downcast_ref::<&str>().copied())
                .unwrap_or("it panicked")
                .to_owned();
            state.dead = Some(message.clone());
            Err(RuntimeError::Dead { message })
        })
    }

    fn drain(&self, state: &mut State) {
        self.inbox.drain(&mut state.commands);
        for command in state.commands.drain(..) {
            match command {
                // The inbox has refused ids in use, so this cannot fail.
                Command::Submit(request) => drop(state.scheduler.submit_unbounded(request)),
                Command::Abort(id) => state.scheduler.abort(id),
            }
        }
    }
}

/// A scheduler that many threads may use. Steps are planned, committed and reverted by one of them at a time.
#[derive(Debug)]
pub struct SchedulerHandle {
    shared: Arc<Shared>,
    map: Arc<SlotMap>,
    planner: Planner,
}

impl SchedulerHandle {
    /// An idle scheduler with its two packed slots.
    ///
    /// # Errors
    /// The configuration cannot work, or there is no memory for the slots.
    pub fn new(config: SchedulerConfig) -> Result<Self, RuntimeError> {
        let scheduler = Scheduler::new(config.clone())?;
        let (map, writer) = SlotWriter::new(config.slot_words())?;
        let inbox = Inbox::new(config.max_waiting);
        let state = State {
            scheduler,
            planned: None,
            writer,
            commands: Vec::new(),
            dead: None,
        };
        let shared = Arc::new(Shared {
            config,
            inbox,
            state: Mutex::new(state),
        });
        Ok(Self {
            planner: Planner::new(Arc::clone(&shared)),
            shared,
            map,
        })
    }

    /// The configuration.
    pub fn config(&self) -> &SchedulerConfig {
        &self.shared.config
    }

    /// The packed slots.
    pub fn slots(&self) -> &Arc<SlotMap> {
        &self.map
    }

    /// Checks a request in the caller's thread and queues it. Never waits for planning.
    ///
    /// # Errors
    /// The request cannot be served, or the queue is full.
    pub fn submit(&self, request: NewRequest) -> Result<(), RuntimeError> {
        let request = request.validate(&self.shared.config)?;
        Ok(self.shared.inbox.submit(request)?)
    }

    /// Ends a request at the next plan, commit or poll. An unknown id is ignored. Never waits for planning.
    pub fn abort(&self, id: RequestId) {
        self.shared.inbox.abort(id);
    }

    /// Plans the next step into packed slot `slot`. None: nothing can run.
    ///
    /// # Errors
    /// A step is in flight, or an argument does not fit.
    pub fn plan(
        &self,
        slot: usize,
        draft_lens: Option<&[i32]>,
    ) -> Result<Option<StepId>, RuntimeError> {
        self.shared.plan(slot, draft_lens)
    }

    /// Starts [`Self::plan`] on the planner thread.
    ///
    /// # Errors
    /// A plan was started and not taken.
    pub fn start_plan(&self, slot: usize, draft_lens: Option<&[i32]>) -> Result<(), RuntimeError> {
        self.planner.start(slot, draft_lens)
    }

    /// Waits for the plan that was started and returns what it gave.
    ///
    /// # Errors
    /// No plan was started, or planning failed.
    pub fn take_plan(&self) -> Result<Option<StepId>, RuntimeError> {
        self.planner.take()
    }

    /// See [`Scheduler::adapt_draft_length`].
    ///
    /// # Errors
    /// Measurements that make no cost table.
    pub fn adapt_draft_length(&self, points: &[CostPoint]) -> Result<(), RuntimeError> {
        self.shared
            .with_state(|state| Ok(state.scheduler.adapt_draft_length(points)?))
    }

    /// Commits the step in flight and adds its events; see [`Scheduler::commit_timed`].
    ///
    /// # Errors
    /// The step is not in flight, or the verdict does not fit it; the step then stays in flight.
    pub fn commit(
        &self,
        id: StepId,
        verdict: &Verdict,
        seconds: Option<f64>,
        events: &mut Events,
    ) -> Result<(), RuntimeError> {
        self.shared.with_state(|state| {
            let step = take_step(state, id)?;
            let committed = state.scheduler.commit_timed(step, verdict, seconds, events);
            if let Err(failed) = committed {
                state.planned = Some(failed.step);
                return Err(failed.error.into());
            }
            self.finish(state, events);
            Ok(())
        })
    }

    /// Reverts the step in flight.
    ///
    /// # Errors
    /// The step is not in flight.
    pub fn revert(&self, id: StepId) -> Result<(), RuntimeError> {
        self.shared.with_state(|state| {
            let step = take_step(state, id)?;
            state.scheduler.revert(step);
            self.shared
                .inbox
                .settle(state.scheduler.num_waiting(), &Events::default());
            Ok(())
        })
    }

    /// Takes in what was submitted and aborted, and adds the final events of requests that ended outside a commit.
    ///
    /// # Errors
    /// The scheduler has failed.
    pub fn poll(&self, events: &mut Events) -> Result<(), RuntimeError> {
        self.shared.with_state(|state| {
            self.shared.drain(state);
            self.finish(state, events);
            Ok(())
        })
    }

    /// Whether a request waits, runs, or has a final event to be polled.
    pub fn has_work(&self) -> bool {
        self.shared.inbox.has_live()
    }

    /// Reads the scheduler. Waits for a plan that is being made.
    ///
    /// # Errors
    /// The scheduler has failed.
    pub fn read<R>(&self, f: impl FnOnce(&Scheduler) -> R) -> Result<R, RuntimeError> {
        self.shared.with_state(|state| Ok(f(&state.scheduler)))
    }

    /// Counts of this moment; requests in the inbox are taken in first.
    ///
    /// # Errors
    /// The scheduler has failed.
    pub fn stats(&self) -> Result<Stats, RuntimeError> {
        self.shared.with_state(|state| {
            self.shared.drain(state);
            Ok(state.scheduler.stats())
        })
    }

    /// See [`Scheduler::propose_ngram`].
    ///
    /// # Errors
    /// Bounds or shapes that do not fit.
    pub fn propose_ngram(
        &self,
        k: usize,
        min_n: usize,
        max_n: usize,
        out_tokens: &mut [i32],
        out_lens: &mut [i32],
    ) -> Result<usize, RuntimeError> {
        self.shared.with_state(|state| {
            Ok(state
                .scheduler
                .propose_ngram(k, min_n, max_n, out_tokens, out_lens)?)
        })
    }

    /// See [`Scheduler::reset_prefix_cache`].
    ///
    /// # Errors
    /// The scheduler has failed.
    pub fn reset_prefix_cache(&self) -> Result<bool, RuntimeError> {
        self.shared
            .with_state(|state| Ok(state.scheduler.reset_prefix_cache()))
    }

    fn finish(&self, state: &mut State, events: &mut Events) {
        state.scheduler.take_ended(events);
        self.shared
            .inbox
            .settle(state.scheduler.num_waiting(), events);
    }
}

fn take_step(state: &mut State, id: StepId) -> Result<PlannedStep, RuntimeError> {
    let in_flight = state.planned.as_ref().map(PlannedStep::id);
    match state.planned.take_if(|step| step.id() == id) {
        Some(step) => Ok(step),
        None => Err(RuntimeError::StaleStep {
            asked: id.0,
            in_flight: in_flight.map(|id| id.0),
        }),
    }
}
