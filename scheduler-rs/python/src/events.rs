//! Events and counts as Python objects.

use numpy::PyArray1;
use pyo3::prelude::*;

/// Columns of what a step told the outside; see the stub.
#[pyclass(frozen, get_all, module = "sonar_engine._scheduler")]
pub(crate) struct Events {
    request_ids: Py<PyArray1<i64>>,
    num_tokens: Py<PyArray1<i32>>,
    finish: Py<PyArray1<i32>>,
    stop_tokens: Py<PyArray1<i32>>,
    num_drafted: Py<PyArray1<i32>>,
    num_accepted: Py<PyArray1<i32>>,
    num_cached: Py<PyArray1<i32>>,
    num_preemptions: Py<PyArray1<i32>>,
    batch_rows: Py<PyArray1<i32>>,
    tokens: Py<PyArray1<i32>>,
}

impl Events {
    /// Copies the columns.
    pub(crate) fn new(py: Python<'_>, events: &sonar_scheduler::Events) -> Self {
        let column = |values: &[i32]| PyArray1::from_slice(py, values).unbind();
        Self {
            request_ids: PyArray1::from_slice(py, &events.request_ids).unbind(),
            num_tokens: column(&events.num_tokens),
            finish: column(&events.finish),
            stop_tokens: column(&events.stop_tokens),
            num_drafted: column(&events.num_drafted),
            num_accepted: column(&events.num_accepted),
            num_cached: column(&events.num_cached),
            num_preemptions: column(&events.num_preemptions),
            batch_rows: column(&events.batch_rows),
            tokens: column(&events.tokens),
        }
    }
}

#[pymethods]
impl Events {
    fn __len__(&self, py: Python<'_>) -> PyResult<usize> {
        self.request_ids.bind(py).as_any().len()
    }
}

/// Counts of one moment; see the stub.
#[pyclass(frozen, get_all, module = "sonar_engine._scheduler")]
pub(crate) struct Stats {
    num_running: usize,
    num_waiting: usize,
    num_pages: u32,
    num_free_pages: u32,
    num_cached_pages: u32,
    prefix_queries: u64,
    prefix_hits: u64,
    num_preemptions: u64,
    waiting_tokens: u64,
}

impl From<sonar_scheduler::Stats> for Stats {
    fn from(stats: sonar_scheduler::Stats) -> Self {
        Self {
            num_running: stats.num_running,
            num_waiting: stats.num_waiting,
            num_pages: stats.num_pages,
            num_free_pages: stats.num_free_pages,
            num_cached_pages: stats.num_cached_pages,
            prefix_queries: stats.prefix_queries,
            prefix_hits: stats.prefix_hits,
            num_preemptions: stats.num_preemptions,
            waiting_tokens: stats.waiting_tokens,
        }
    }
}
