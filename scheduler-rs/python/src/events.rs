//! Events and counts as Python objects.

use numpy::PyArray1;
use pyo3::prelude::*;

/// Columns of what a step told the outside; see the stub. An array is made when it is asked for.
#[pyclass(frozen, module = "sonar_engine._scheduler")]
pub(crate) struct Events(pub(crate) sonar_scheduler::Events);

macro_rules! columns {
    ($($column:ident: $item:ty),*) => {
        #[pymethods]
        impl Events {
            $(
                #[getter]
                fn $column<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<$item>> {
                    PyArray1::from_slice(py, &self.0.$column)
                }
            )*

            fn __len__(&self) -> usize {
                self.0.len()
            }
        }
    };
}

columns! {
    request_ids: i64,
    num_tokens: i32,
    finish: i32,
    stop_tokens: i32,
    num_drafted: i32,
    num_accepted: i32,
    num_cached: i32,
    num_preemptions: i32,
    batch_rows: i32,
    tokens: i32
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
    draft_length: u32,
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
            draft_length: stats.draft_length,
        }
    }
}
