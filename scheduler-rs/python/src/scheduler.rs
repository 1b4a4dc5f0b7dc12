//! `Scheduler`: every method detaches from the interpreter, calls the runtime, maps the error, comes back.

use crate::arrays::{not_contiguous, read1, read2, write1, write2};
use crate::errors::{config_error, invalid_request, to_py};
use crate::events::{Events, Stats};
use numpy::ndarray::ArrayView1;
use numpy::{PyArray1, PyUntypedArrayMethods};
use pyo3::prelude::*;
use sonar_runtime::{RuntimeError, SchedulerHandle};
use sonar_scheduler::{CostPoint, NewRequest, RequestId, SchedulerConfig, StepId, Verdict};

/// The scheduler; see the stub.
#[pyclass(frozen, module = "sonar_engine._scheduler")]
pub(crate) struct Scheduler {
    handle: SchedulerHandle,
}

impl Scheduler {
    /// Runs `f` without the interpreter.
    fn call<R: Send>(
        &self,
        py: Python<'_>,
        f: impl FnOnce(&SchedulerHandle) -> Result<R, RuntimeError> + Send,
    ) -> PyResult<R> {
        let handle = &self.handle;
        py.detach(|| f(handle)).map_err(|error| to_py(py, &error))
    }

    /// Runs `f`, which adds events, without the interpreter.
    fn collect(
        &self,
        py: Python<'_>,
        f: impl FnOnce(&SchedulerHandle, &mut sonar_scheduler::Events) -> Result<(), RuntimeError>
        + Send,
    ) -> PyResult<Events> {
        let mut events = sonar_scheduler::Events::default();
        self.call(py, |handle| f(handle, &mut events))?;
        Ok(Events(events))
    }
}

fn sized(py: Python<'_>, name: &str, value: i64) -> PyResult<u32> {
    u32::try_from(value).map_err(|_| {
        config_error(
            py,
            format!("{name} is {value}; it must be in 0..4294967296"),
        )
    })
}

/// A count of a request: negative is an error, beyond 32 bits is as good as no limit.
fn count(py: Python<'_>, name: &'static str, value: i64) -> PyResult<u32> {
    if value < 0 {
        let message = format!("{name} is {value}; it must not be negative");
        return Err(invalid_request(py, message, Some(name), "invalid_value"));
    }
    Ok(u32::try_from(value).unwrap_or(u32::MAX))
}

fn request_id(py: Python<'_>, id: i64) -> PyResult<RequestId> {
    match u64::try_from(id) {
        Ok(id) => Ok(RequestId(id)),
        Err(_) => {
            let message = format!("request_id is {id}; it must not be negative");
            Err(invalid_request(
                py,
                message,
                Some("request_id"),
                "invalid_value",
            ))
        }
    }
}

fn unknown_request(py: Python<'_>, id: RequestId) -> PyErr {
    let message = format!("there is no live request {}", id.0);
    invalid_request(py, message, Some("request_id"), "unknown_request")
}

#[pymethods]
impl Scheduler {
    #[new]
    #[pyo3(signature = (*, page_size, num_pages, max_num_seqs, max_num_batched_tokens, max_model_len, vocab_size,
        max_waiting, enable_prefix_caching, num_speculative_tokens, eos_token_ids, cache_key,
        speculate_in_mixed_batches=false, page_hash_covers_next_token=false))]
    #[allow(clippy::too_many_arguments)] // named arguments of the Python class
    fn new(
        py: Python<'_>,
        page_size: i64,
        num_pages: i64,
        max_num_seqs: i64,
        max_num_batched_tokens: i64,
        max_model_len: i64,
        vocab_size: i64,
        max_waiting: i64,
        enable_prefix_caching: bool,
        num_speculative_tokens: i64,
        eos_token_ids: &Bound<'_, PyAny>,
        cache_key: &[u8],
        speculate_in_mixed_batches: bool,
        page_hash_covers_next_token: bool,
    ) -> PyResult<Self> {
        let eos_token_ids = read1("eos_token_ids", "[any]", eos_token_ids)?;
        let config = SchedulerConfig {
            page_size: sized(py, "page_size", page_size)?,
            num_pages: sized(py, "num_pages", num_pages)?,
            max_num_seqs: sized(py, "max_num_seqs", max_num_seqs)?,
            max_num_batched_tokens: sized(py, "max_num_batched_tokens", max_num_batched_tokens)?,
            max_model_len: sized(py, "max_model_len", max_model_len)?,
            vocab_size: sized(py, "vocab_size", vocab_size)?,
            max_waiting: sized(py, "max_waiting", max_waiting)?,
            enable_prefix_caching,
            page_hash_covers_next_token,
            num_speculative_tokens: sized(py, "num_speculative_tokens", num_speculative_tokens)?,
            speculate_in_mixed_batches,
            eos_token_ids: eos_token_ids.as_array().to_vec(),
            cache_key: cache_key.try_into().map_err(|_| {
                config_error(
                    py,
                    format!("cache_key has {} bytes; it must have 32", cache_key.len()),
                )
            })?,
        };
        let handle = SchedulerHandle::new(config).map_err(|error| to_py(py, &error))?;
        Ok(Self { handle })
    }

    #[getter]
    fn slot_words(&self) -> usize {
        self.handle.slots().num_words()
    }

    fn slot<'py>(slf: &Bound<'py, Self>, index: usize) -> PyResult<Bound<'py, PyArray1<i32>>> {
        let map = slf.get().handle.slots();
        let first = map.as_ptr(index).map_err(|error| to_py(slf.py(), &error))?;
        // SAFETY: the slot holds num_words words at this address for as long as its map, which lives as long as
        // `slf`, the array's base object. Readers leave a slot alone while a step is planned into it.
        unsafe {
            let words = ArrayView1::from_shape_ptr(map.num_words(), first);
            Ok(PyArray1::borrow_from_array(&words, slf.clone().into_any()))
        }
    }

    #[pyo3(signature = (request_id, prompt, *, max_tokens=None, min_tokens=0, stop_token_ids=None, ignore_eos=false,
        priority=0, cache_salt=None, num_speculative_tokens=None))]
    #[allow(clippy::too_many_arguments)] // named arguments of the Python method
    fn submit(
        &self,
        py: Python<'_>,
        request_id: i64,
        prompt: &Bound<'_, PyAny>,
        max_tokens: Option<i64>,
        min_tokens: i64,
        stop_token_ids: Option<&Bound<'_, PyAny>>,
        ignore_eos: bool,
        priority: i64,
        cache_salt: Option<Vec<u8>>,
        num_speculative_tokens: Option<i64>,
    ) -> PyResult<()> {
        let prompt = read1("prompt", "[num_prompt_tokens]", prompt)?
            .as_array()
            .to_vec();
        let stop_token_ids = match stop_token_ids {
            Some(ids) => read1("stop_token_ids", "[any]", ids)?.as_array().to_vec(),
            None => Vec::new(),
        };
        let optional =
            |name, value: Option<i64>| value.map(|value| count(py, name, value)).transpose();
        let request = NewRequest {
            id: self::request_id(py, request_id)?,
            prompt,
            max_tokens: optional("max_tokens", max_tokens)?,
            min_tokens: count(py, "min_tokens", min_tokens)?,
            stop_token_ids,
            ignore_eos,
            priority,
            cache_salt,
            num_speculative_tokens: optional("num_speculative_tokens", num_speculative_tokens)?,
        };
        self.call(py, |handle| handle.submit(request))
    }

    fn abort(&self, py: Python<'_>, request_id: i64) {
        if let Ok(id) = u64::try_from(request_id) {
            py.detach(|| self.handle.abort(RequestId(id)));
        }
    }

    #[pyo3(signature = (slot, draft_lens))]
    fn plan(
        &self,
        py: Python<'_>,
        slot: usize,
        draft_lens: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Option<u64>> {
        let lens = draft_lens
            .map(|lens| read1("draft_lens", "[max_num_seqs]", lens))
            .transpose()?;
        let lens = lens.as_ref().map(|lens| {
            lens.as_slice()
                .map_err(|_| not_contiguous(py, "draft_lens"))
        });
        let lens = lens.transpose()?;
        Ok(self
            .call(py, |handle| handle.plan(slot, lens))?
            .map(|id| id.0))
    }

    #[pyo3(signature = (slot, draft_lens))]
    fn start_plan(
        &self,
        py: Python<'_>,
        slot: usize,
        draft_lens: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let lens = draft_lens
            .map(|lens| read1("draft_lens", "[max_num_seqs]", lens))
            .transpose()?;
        let lens = lens.as_ref().map(|lens| {
            lens.as_slice()
                .map_err(|_| not_contiguous(py, "draft_lens"))
        });
        let lens = lens.transpose()?;
        self.call(py, |handle| handle.start_plan(slot, lens))
    }

    fn take_plan(&self, py: Python<'_>) -> PyResult<Option<u64>> {
        Ok(self.call(py, SchedulerHandle::take_plan)?.map(|id| id.0))
    }

    fn adapt_draft_length(&self, py: Python<'_>, points: Vec<(u32, u32, f64)>) -> PyResult<()> {
        let points: Vec<CostPoint> = points
            .into_iter()
            .map(|(num_rows, num_drafts, seconds)| CostPoint {
                num_rows,
                num_drafts,
                seconds,
            })
            .collect();
        self.call(py, |handle| handle.adapt_draft_length(&points))
    }

    #[pyo3(signature = (step_id, num_emitted, tokens, seconds=None))]
    fn commit(
        &self,
        py: Python<'_>,
        step_id: u64,
        num_emitted: &Bound<'_, PyAny>,
        tokens: &Bound<'_, PyAny>,
        seconds: Option<f64>,
    ) -> PyResult<Events> {
        let num_emitted = read1("num_emitted", "[num_reqs]", num_emitted)?;
        let tokens = read2("tokens", "[num_reqs, width]", tokens)?;
        let width = tokens.shape()[1];
        let num_emitted = num_emitted
            .as_slice()
            .map_err(|_| not_contiguous(py, "num_emitted"))?;
        let tokens = tokens
            .as_slice()
            .map_err(|_| not_contiguous(py, "tokens"))?;
        self.collect(py, |handle, events| {
            handle.commit(
                StepId(step_id),
                &Verdict::chain(num_emitted, tokens, width),
                seconds,
                events,
            )
        })
    }

    fn revert(&self, py: Python<'_>, step_id: u64) -> PyResult<()> {
        self.call(py, |handle| handle.revert(StepId(step_id)))
    }

    fn poll(&self, py: Python<'_>) -> PyResult<Option<Events>> {
        let events = self.collect(py, SchedulerHandle::poll)?;
        Ok((!events.0.is_empty()).then_some(events))
    }

    fn has_work(&self) -> bool {
        self.handle.has_work()
    }

    fn request_tokens<'py>(
        &self,
        py: Python<'py>,
        request_id: i64,
    ) -> PyResult<Bound<'py, PyArray1<i32>>> {
        let id = self::request_id(py, request_id)?;
        let tokens = self.call(py, |handle| {
            handle.read(|scheduler| scheduler.request_tokens(id).map(<[i32]>::to_vec))
        })?;
        Ok(PyArray1::from_vec(
            py,
            tokens.ok_or_else(|| unknown_request(py, id))?,
        ))
    }

    fn num_prompt_tokens(&self, py: Python<'_>, request_id: i64) -> PyResult<u32> {
        let id = self::request_id(py, request_id)?;
        let num = self.call(py, |handle| {
            handle.read(|scheduler| scheduler.num_prompt_tokens(id))
        })?;
        num.ok_or_else(|| unknown_request(py, id))
    }

    fn propose_ngram(
        &self,
        py: Python<'_>,
        k: usize,
        min_n: usize,
        max_n: usize,
        out_tokens: &Bound<'_, PyAny>,
        out_lens: &Bound<'_, PyAny>,
    ) -> PyResult<usize> {
        let mut tokens = write2("out_tokens", "[max_num_seqs, k]", out_tokens)?;
        let mut lens = write1("out_lens", "[max_num_seqs]", out_lens)?;
        if tokens.shape()[1] != k {
            let message = format!(
                "out_tokens is {} wide; it must be k = {k}",
                tokens.shape()[1]
            );
            return Err(config_error(py, message));
        }
        let tokens = tokens
            .as_slice_mut()
            .map_err(|_| not_contiguous(py, "out_tokens"))?;
        let lens = lens
            .as_slice_mut()
            .map_err(|_| not_contiguous(py, "out_lens"))?;
        self.call(py, |handle| {
            handle.propose_ngram(k, min_n, max_n, tokens, lens)
        })
    }

    fn stats(&self, py: Python<'_>) -> PyResult<Stats> {
        Ok(self.call(py, SchedulerHandle::stats)?.into())
    }

    fn reset_prefix_cache(&self, py: Python<'_>) -> PyResult<bool> {
        self.call(py, SchedulerHandle::reset_prefix_cache)
    }

    fn check_integrity(&self, py: Python<'_>) -> PyResult<()> {
        let checked = self.call(py, |handle| {
            handle.read(sonar_scheduler::Scheduler::check_invariants)
        })?;
        checked.map_err(|message| to_py(py, &RuntimeError::Dead { message }))
    }
}
