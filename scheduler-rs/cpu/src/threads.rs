//! Running numbered tasks on several threads.
//!
//! Inside a process that computes with OpenMP the team of libgomp is used, because its idle threads spin: a second
//! pool would fight with them for the cores. Elsewhere scoped threads do the work.
use std::any::Any;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

type TeamBody = unsafe extern "C" fn(*mut c_void);
type StartTeam = unsafe extern "C" fn(TeamBody, *mut c_void, c_uint, c_uint);
type ThreadNumber = unsafe extern "C" fn() -> c_int;

#[derive(Clone, Copy, Debug)]
struct Gomp {
    parallel: StartTeam,
    thread_num: ThreadNumber,
}

/// A team of threads; cheap to keep, it owns none of them.
#[derive(Debug)]
pub struct Threads {
    count: usize,
    gomp: Option<Gomp>,
}

struct Region<'a> {
    next: AtomicUsize,
    tasks: usize,
    body: &'a (dyn Fn(usize, usize) + Sync),
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    thread_num: Option<ThreadNumber>,
}

impl Region<'_> {
    /// Takes tasks until none is left. A panic is kept for the caller: it must not cross the C frames of the team.
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
            if let Ok(mut slot) = self.panic.lock() {
                *slot = Some(payload);
            }
        }
    }
}

unsafe extern "C" fn team_body(data: *mut c_void) {
    // SAFETY: `run` passes a region that outlives the team.
    let region = unsafe { &*data.cast::<Region<'_>>() };
    // SAFETY: resolved from the library that called us.
    let worker = region.thread_num.map_or(0, |number| unsafe { number() });
    region.work(worker as usize);
}

impl Threads {
    /// A team of `count` threads (at least one).
    pub fn new(count: usize) -> Threads {
        Threads {
            count: count.max(1),
            gomp: find_gomp(),
        }
    }

    /// Threads of the team.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Whether the work runs on libgomp's team.
    pub fn uses_openmp(&self) -> bool {
        self.gomp.is_some()
    }

    /// Calls `body(worker, task)` once for each task in 0..tasks; `worker` is below `count` and not shared at a time.
    ///
    /// # Panics
    /// With the panic of a task, once all threads have stopped.
    pub fn run(&self, tasks: usize, body: &(dyn Fn(usize, usize) + Sync)) {
        let team = self.count.min(tasks);
        if team <= 1 {
            (0..tasks).for_each(|task| body(0, task));
            return;
        }
        let region = Region {
            next: AtomicUsize::new(0),
            tasks,
            body,
            panic: Mutex::new(None),
            thread_num: self.gomp.map(|gomp| gomp.thread_num),
        };
        match self.gomp {
            // SAFETY: `team_body` reads the region, which lives until the team has joined.
            Some(gomp) => unsafe {
                (gomp.parallel)(
                    team_body,
                    (&raw const region).cast_mut().cast(),
                    team as c_uint,
                    0,
                );
            },
            None => std::thread::scope(|scope| {
                let region = &region;
                for worker in 1..team {
                    scope.spawn(move || region.work(worker));
                }
                region.work(0);
            }),
        }
        let payload = region.panic.into_inner().unwrap_or(None);
        if let Some(payload) = payload {
            resume_unwind(payload);
        }
    }
}

/// libgomp's entry points, when the process has loaded it.
fn find_gomp() -> Option<Gomp> {
    // SAFETY: a lookup among the libraries already loaded.
    let mut handle = libc::RTLD_DEFAULT;
    if lookup(handle, c"GOMP_parallel").is_none() {
        let path = loaded_gomp_path()?;
        // SAFETY: the path is a C string; NOLOAD runs no code of a new library.
        handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
        if handle.is_null() {
            return None;
        }
    }
    let parallel = lookup(handle, c"GOMP_parallel")?;
    let thread_num = lookup(handle, c"omp_get_thread_num")?;
    // SAFETY: these symbols have these C types (libgomp ABI, since GOMP_4.0 and OMP_1.0).
    unsafe {
        Some(Gomp {
            parallel: std::mem::transmute::<*mut c_void, StartTeam>(parallel),
            thread_num: std::mem::transmute::<*mut c_void, ThreadNumber>(thread_num),
        })
    }
}

fn lookup(handle: *mut c_void, name: &CStr) -> Option<*mut c_void> {
    // SAFETY: `name` is a C string, `handle` a live handle or RTLD_DEFAULT.
    let symbol = unsafe { libc::dlsym(handle, name.as_ptr().cast::<c_char>()) };
    (!symbol.is_null()).then_some(symbol)
}

fn loaded_gomp_path() -> Option<std::ffi::CString> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let path = maps
        .lines()
        .filter_map(|line| line.split_whitespace().nth(5))
        .find(|path| path.contains("libgomp"))?;
    std::ffi::CString::new(path).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once() {
        let counts: Vec<AtomicUsize> = (0..100).map(|_| AtomicUsize::new(0)).collect();
        Threads::new(3).run(100, &|worker, task| {
            assert!(worker < 3);
            counts[task].fetch_add(1, Ordering::Relaxed);
        });
        assert!(
            counts
                .iter()
                .all(|count| count.load(Ordering::Relaxed) == 1)
        );
    }

    #[test]
    fn a_panic_of_a_task_reaches_the_caller() {
        let threads = Threads::new(2);
        let caught = catch_unwind(AssertUnwindSafe(|| {
            threads.run(8, &|_, task| assert!(task != 5, "task five fails"));
        }));
        assert!(caught.is_err());
    }
}
