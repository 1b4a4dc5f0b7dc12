//! Submissions and aborts on their way to the scheduler, and the ids of all requests whose final event is still to come.
//!
//! The lock is held for a push or a swap, never while a step is planned.

use parking_lot::Mutex;
use sonar_scheduler::{Events, RequestError, RequestId, ValidRequest};
use std::collections::HashSet;

#[derive(Debug)]
pub(crate) enum Command {
    Submit(ValidRequest),
    Abort(RequestId),
}

#[derive(Debug, Default)]
struct Queue {
    commands: Vec<Command>,
    live: HashSet<RequestId>,
    /// Submissions in `commands`.
    num_submitted: usize,
    /// Waiting requests of the scheduler, as it last said.
    num_waiting: usize,
}

#[derive(Debug)]
pub(crate) struct Inbox {
    queue: Mutex<Queue>,
    max_waiting: u32,
}

impl Inbox {
    pub(crate) fn new(max_waiting: u32) -> Self {
        Self {
            queue: Mutex::default(),
            max_waiting,
        }
    }

    pub(crate) fn submit(&self, request: ValidRequest) -> Result<(), RequestError> {
        let mut queue = self.queue.lock();
        let num_waiting = queue.num_waiting + queue.num_submitted;
        if queue.live.contains(&request.id()) {
            return Err(RequestError::DuplicateId { id: request.id().0 });
        }
        if num_waiting >= self.max_waiting as usize {
            return Err(RequestError::QueueFull {
                num_waiting,
                max_waiting: self.max_waiting,
            });
        }
        queue.live.insert(request.id());
        queue.num_submitted += 1;
        queue.commands.push(Command::Submit(request));
        Ok(())
    }

    /// An id without a request is ignored.
    pub(crate) fn abort(&self, id: RequestId) {
        let mut queue = self.queue.lock();
        if queue.live.contains(&id) {
            queue.commands.push(Command::Abort(id));
        }
    }

    pub(crate) fn has_live(&self) -> bool {
        !self.queue.lock().live.is_empty()
    }

    /// Swaps the commands with the empty `out`.
    pub(crate) fn drain(&self, out: &mut Vec<Command>) {
        let mut queue = self.queue.lock();
        queue.num_waiting += std::mem::take(&mut queue.num_submitted);
        std::mem::swap(&mut queue.commands, out);
    }

    /// Takes note of the scheduler's queue and of the requests that `events` end.
    pub(crate) fn settle(&self, num_waiting: usize, events: &Events) {
        let mut queue = self.queue.lock();
        queue.num_waiting = num_waiting;
        for (&id, &finish) in events.request_ids.iter().zip(&events.finish) {
            if finish != 0 {
                queue.live.remove(&RequestId(id as u64));
            }
        }
    }
}
