//! Running numbered tasks on several threads.
//!
//! Helpers are optional: tasks are taken from a counter, and a region ends when the tasks are done and no helper is
//! inside. A helper that the system has not scheduled is not waited for, so a busy machine slows a region down by the
//! lost share of the cores, not by a time slice. Idle helpers spin for a moment, then sleep.
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, TryLockError};
use std::thread::JoinHandle;

/// Turns of the idle loop before a helper sleeps: about 100 microseconds.
const IDLE_SPINS: u32 = 3000;
/// Turns before the caller gives its core away to a helper that is still inside a task.
const JOIN_SPINS: u32 = 2000;

/// A team: the calling thread and `count - 1` helpers.
#[derive(Debug)]
pub struct Threads {
    count: usize,
    shared: Arc<Shared>,
    helpers: Vec<JoinHandle<()>>,
    busy: Mutex<()>,
}

/// The state that the caller and its helpers share.
///
/// `gate` is `epoch << 32 | OPEN | helpers inside`. `region` is valid while the gate is open or a helper is inside.
#[derive(Debug, Default)]
struct Shared {
    gate: AtomicU64,
    region: AtomicPtr<Region<'static>>,
    sleeping: AtomicUsize,
    stop: AtomicBool,
    lock: Mutex<()>,
    wake: Condvar,
}

const OPEN: u64 = 1 << 31;
const INSIDE: u64 = OPEN - 1;
const EPOCH: u64 = 1 << 32;

struct Region<'a> {
    next: AtomicUsize,
    tasks: usize,
    body: &'a (dyn Fn(usize, usize) + Sync),
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

impl Region<'_> {
    /// Takes tasks until none is left. A panic is kept for the caller.
    fn work(&self, worker: usize) {
        let result = catch_unwind(AssertUnwindSafe(|| {
            loop {
                let task = self.next.fetch_add(1, Ordering::Relaxed);
                if task >= self.tasks {
                    break;
                }
                (self.body)(worker, task);
            }
        }));
        if let Err(payload) = result {
            self.next.store(self.tasks, Ordering::Relaxed);
            *self.panic.lock().unwrap_or_else(PoisonError::into_inner) = Some(payload);
        }
    }
}

impl Shared {
    /// Life of a helper.
    fn serve(&self, worker: usize) {
        let mut last_epoch = 0;
        let mut idle = 0;
        while !self.stop.load(Ordering::Relaxed) {
            let gate = self.gate.load(Ordering::SeqCst);
            if gate & OPEN != 0 && gate / EPOCH != last_epoch {
                if self
                    .gate
                    .compare_exchange(gate, gate + 1, Ordering::SeqCst, Ordering::SeqCst)
                    .is_ok()
                {
                    last_epoch = gate / EPOCH;
                    // SAFETY: we are counted as inside, so the caller keeps the region alive.
                    unsafe { (*self.region.load(Ordering::SeqCst)).work(worker) };
                    self.gate.fetch_sub(1, Ordering::SeqCst);
                }
                idle = 0;
                continue;
            }
            idle += 1;
            if idle < IDLE_SPINS {
                std::hint::spin_loop();
            } else {
                self.sleep(last_epoch);
                idle = 0;
            }
        }
    }

    /// Sleeps until a region newer than `last_epoch` opens or the team ends.
    fn sleep(&self, last_epoch: u64) {
        let mut guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        self.sleeping.fetch_add(1, Ordering::SeqCst);
        loop {
            let gate = self.gate.load(Ordering::SeqCst);
            if (gate & OPEN != 0 && gate / EPOCH != last_epoch) || self.stop.load(Ordering::SeqCst)
            {
                break;
            }
            guard = self
                .wake
                .wait(guard)
                .unwrap_or_else(PoisonError::into_inner);
        }
        self.sleeping.fetch_sub(1, Ordering::SeqCst);
    }

    /// Wakes helpers that sleep. One that is about to sleep sees the open gate under the lock instead.
    fn rouse(&self) {
        if self.sleeping.load(Ordering::SeqCst) > 0 {
            drop(self.lock.lock().unwrap_or_else(PoisonError::into_inner));
            self.wake.notify_all();
        }
    }

    /// Opens the gate to `region`, works, and returns once no helper is inside.
    fn run(&self, region: &Region<'_>) {
        self.region
            .store((&raw const *region).cast_mut().cast(), Ordering::SeqCst);
        let epoch = (self.gate.load(Ordering::SeqCst) / EPOCH + 1) & (u64::MAX / EPOCH);
        self.gate.store((epoch * EPOCH) | OPEN, Ordering::SeqCst);
        self.rouse();
        region.work(0);
        self.gate.fetch_and(!OPEN, Ordering::SeqCst);
        let mut spins = 0;
        while self.gate.load(Ordering::SeqCst) & INSIDE != 0 {
            spins += 1;
            if spins < JOIN_SPINS {
                std::hint::spin_loop();
            } else {
                std::thread::yield_now();
            }
        }
    }
}

impl Threads {
    /// A team of `count` threads (at least one), the caller's included.
    pub fn new(count: usize) -> Threads {
        let count = count.max(1);
        let shared = Arc::new(Shared::default());
        let helpers = (1..count)
            .filter_map(|worker| {
                let shared = Arc::clone(&shared);
                let name = format!("sonar-cpu-{worker}");
                // a team that could not get all its helpers is slower, not wrong
                std::thread::Builder::new()
                    .name(name)
                    .spawn(move || shared.serve(worker))
                    .ok()
            })
            .collect();
        Threads {
            count,
            shared,
            helpers,
            busy: Mutex::new(()),
        }
    }

    /// Threads of the team.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Calls `body(worker, task)` once for each task in 0..tasks; `worker` is below `count`. Calls at the same time
    /// from several threads are allowed: one gets the helpers, the others work alone as worker 0.
    ///
    /// # Panics
    /// With the panic of a task, once all threads have stopped.
    pub fn run(&self, tasks: usize, body: &(dyn Fn(usize, usize) + Sync)) {
        let region = Region {
            next: AtomicUsize::new(0),
            tasks,
            body,
            panic: Mutex::new(None),
        };
        let alone = tasks <= 1 || self.helpers.is_empty();
        let held = match self.busy.try_lock() {
            _ if alone => None,
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        };
        match held {
            Some(_) => self.shared.run(&region),
            None => region.work(0),
        }
        drop(held);
        let payload = region
            .panic
            .into_inner()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(payload) = payload {
            resume_unwind(payload);
        }
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        drop(
            self.shared
                .lock
                .lock()
                .unwrap_or_else(PoisonError::into_inner),
        );
        self.shared.wake.notify_all();
        for helper in self.helpers.drain(..) {
            // a helper cannot panic: `work` catches what tasks do
            let _ = helper.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once_in_each_of_many_regions() {
        let threads = Threads::new(3);
        for tasks in (0..40).cycle().take(4000) {
            let counts: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
            threads.run(tasks, &|worker, task| {
                assert!(worker < 3);
                counts[task].fetch_add(1, Ordering::Relaxed);
            });
            assert!(
                counts
                    .iter()
                    .all(|count| count.load(Ordering::Relaxed) == 1)
            );
        }
    }

    #[test]
    fn helpers_that_sleep_wake_up() {
        let threads = Threads::new(2);
        for _ in 0..3 {
            std::thread::sleep(std::time::Duration::from_millis(20));
            let helped = AtomicBool::new(false);
            // the caller waits in its task for the helper, so the region ends only if one came
            threads.run(2, &|worker, _| {
                let since = std::time::Instant::now();
                helped.fetch_or(worker == 1, Ordering::SeqCst);
                while !helped.load(Ordering::SeqCst) && since.elapsed().as_secs() < 20 {
                    std::thread::yield_now();
                }
            });
            assert!(helped.load(Ordering::SeqCst));
        }
    }

    #[test]
    fn callers_at_the_same_time_all_finish() {
        let threads = Threads::new(2);
        let total = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        threads.run(7, &|_, _| {
                            total.fetch_add(1, Ordering::Relaxed);
                        });
                    }
                });
            }
        });
        assert_eq!(total.load(Ordering::Relaxed), 3 * 200 * 7);
    }

    #[test]
    fn a_panic_of_a_task_reaches_the_caller_and_the_team_lives_on() {
        let threads = Threads::new(2);
        let caught = catch_unwind(AssertUnwindSafe(|| {
            threads.run(8, &|_, task| assert!(task != 5, "task five fails"));
        }));
        assert!(caught.is_err());
        let done = AtomicUsize::new(0);
        threads.run(8, &|_, _| {
            done.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(done.load(Ordering::Relaxed), 8);
    }
}
