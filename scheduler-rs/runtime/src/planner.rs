//! A thread that plans while its caller does something else. It is started with the first plan and ends with its handle.

use crate::error::RuntimeError;
use crate::handle::Shared;
use crossbeam_channel::{Receiver, Sender, bounded};
use parking_lot::Mutex;
use sonar_scheduler::StepId;
use std::sync::Arc;
use std::thread::JoinHandle;

struct Job {
    slot: usize,
    draft_lens: Vec<i32>,
    has_drafts: bool,
}

struct Done {
    result: Result<Option<StepId>, RuntimeError>,
    draft_lens: Vec<i32>,
}

#[derive(Debug)]
struct Thread {
    jobs: Sender<Job>,
    done: Receiver<Done>,
    thread: JoinHandle<()>,
    is_pending: bool,
    /// Memory of the last job's draft lengths, used again.
    draft_lens: Vec<i32>,
}

#[derive(Debug)]
pub(crate) struct Planner {
    shared: Arc<Shared>,
    thread: Mutex<Option<Thread>>,
}

impl Planner {
    pub(crate) fn new(shared: Arc<Shared>) -> Self {
        Self {
            shared,
            thread: Mutex::new(None),
        }
    }

    pub(crate) fn start(
        &self,
        slot: usize,
        draft_lens: Option<&[i32]>,
    ) -> Result<(), RuntimeError> {
        let mut guard = self.thread.lock();
        let thread = match &mut *guard {
            Some(thread) => thread,
            None => guard.insert(spawn(Arc::clone(&self.shared)).map_err(RuntimeError::Spawn)?),
        };
        if thread.is_pending {
            return Err(RuntimeError::PlanPending);
        }
        let mut job = Job {
            slot,
            draft_lens: std::mem::take(&mut thread.draft_lens),
            has_drafts: draft_lens.is_some(),
        };
        job.draft_lens.clear();
        job.draft_lens
            .extend_from_slice(draft_lens.unwrap_or_default());
        thread.jobs.send(job).map_err(|_| ended())?;
        thread.is_pending = true;
        Ok(())
    }

    pub(crate) fn take(&self) -> Result<Option<StepId>, RuntimeError> {
        let mut guard = self.thread.lock();
        let Some(thread) = guard.as_mut().filter(|thread| thread.is_pending) else {
            return Err(RuntimeError::NoPlan);
        };
        thread.is_pending = false;
        let done = thread.done.recv().map_err(|_| ended())?;
        thread.draft_lens = done.draft_lens;
        done.result
    }
}

impl Drop for Planner {
    fn drop(&mut self) {
        if let Some(Thread {
            jobs, done, thread, ..
        }) = self.thread.get_mut().take()
        {
            drop((jobs, done));
            // A panic while planning is caught in `Shared`, so the thread ends by its channel alone.
            drop(thread.join());
        }
    }
}

fn spawn(shared: Arc<Shared>) -> std::io::Result<Thread> {
    let (jobs, inbound) = bounded::<Job>(1);
    let (outbound, done) = bounded(1);
    let plan = move || {
        for Job {
            slot,
            draft_lens,
            has_drafts,
        } in inbound
        {
            let result = shared.plan(slot, has_drafts.then_some(&draft_lens));
            if outbound.send(Done { result, draft_lens }).is_err() {
                return;
            }
        }
    };
    let thread = std::thread::Builder::new()
        .name("sonar-planner".into())
        .spawn(plan)?;
    Ok(Thread {
        jobs,
        done,
        thread,
        is_pending: false,
        draft_lens: Vec::new(),
    })
}

fn ended() -> RuntimeError {
    RuntimeError::Dead {
        message: "the planner thread has ended".into(),
    }
}
