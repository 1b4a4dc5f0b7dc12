//! Paged attention on the CPU for Python; see `cpu` for the rules on addresses.
use std::sync::{Arc, Mutex};

use pyo3::exceptions::{PyIndexError, PyValueError};
use pyo3::prelude::*;
use sonar_cpu::attention::{Batch, Geometry, LayerCache, Plan, Tensors, Workspace, attend};
use sonar_cpu::dtype::Dtype;

use crate::cpu::{CpuKernels, DETACH_WORK, Runtime, dtype, lock, source, target};

/// Addresses of the packed batch of the current step.
#[derive(Clone, Copy, Default)]
struct StepArrays {
    num_reqs: usize,
    num_tokens: usize,
    qo_indptr: usize,
    slots: usize,
    positions: usize,
    slot_mapping: usize,
    page_table: usize,
    page_table_stride: usize,
}

impl StepArrays {
    /// # Safety
    /// The step's arrays are alive and as long as the counts say.
    unsafe fn batch(&self) -> Batch<'_> {
        // SAFETY: the contract of this function.
        unsafe {
            Batch {
                qo_indptr: std::slice::from_raw_parts(
                    self.qo_indptr as *const i32,
                    self.num_reqs + 1,
                ),
                slots: std::slice::from_raw_parts(self.slots as *const i32, self.num_reqs),
                positions: std::slice::from_raw_parts(
                    self.positions as *const i32,
                    self.num_tokens,
                ),
                slot_mapping: std::slice::from_raw_parts(
                    self.slot_mapping as *const i32,
                    self.num_tokens,
                ),
                page_table: self.page_table as *const i32,
                page_table_stride: self.page_table_stride,
            }
        }
    }
}

#[derive(Default)]
struct Step {
    arrays: StepArrays,
    plan: Plan,
    planned_q_heads: usize, // 0: the plan is stale
}

/// Attention of one model over its paged caches `[num_pages, 2, page_size, num_kv_heads, head_dim]`.
#[pyclass(frozen, module = "sonar_engine._scheduler")]
pub struct CpuAttention {
    runtime: Arc<Runtime>,
    caches: Vec<usize>,
    dtype: Dtype,
    geometry: Geometry, // num_q_heads is set by each call
    workspace: Workspace,
    step: Mutex<Step>,
}

#[pymethods]
impl CpuAttention {
    /// `caches` holds the address of each layer's cache; `window` 0 sees all keys.
    #[new]
    #[allow(clippy::too_many_arguments)]
    fn new(
        kernels: &CpuKernels,
        caches: Vec<usize>,
        dtype_code: u8,
        num_kv_heads: usize,
        head_dim: usize,
        page_size: usize,
        window: usize,
        scale: f32,
    ) -> PyResult<CpuAttention> {
        if head_dim == 0 || !head_dim.is_multiple_of(8) || num_kv_heads == 0 || page_size == 0 {
            return Err(PyValueError::new_err(format!(
                "head_dim {head_dim} must be a positive multiple of 8, \
                 num_kv_heads {num_kv_heads} and page_size {page_size} positive"
            )));
        }
        let window = (window != 0).then_some(window);
        Ok(CpuAttention {
            runtime: Arc::clone(&kernels.runtime),
            caches,
            dtype: dtype(dtype_code)?,
            geometry: Geometry {
                num_q_heads: num_kv_heads,
                num_kv_heads,
                head_dim,
                page_size,
                window,
                scale,
            },
            workspace: Workspace::new(kernels.runtime.threads.count()),
            step: Mutex::default(),
        })
    }

    /// Takes the addresses of a step's int32 arrays; they stay alive until its last `forward`.
    #[allow(clippy::too_many_arguments)]
    fn begin(
        &self,
        num_reqs: usize,
        num_tokens: usize,
        qo_indptr: usize,
        slots: usize,
        positions: usize,
        slot_mapping: usize,
        page_table: usize,
        page_table_stride: usize,
    ) {
        let mut step = lock(&self.step);
        step.arrays = StepArrays {
            num_reqs,
            num_tokens,
            qo_indptr,
            slots,
            positions,
            slot_mapping,
            page_table,
            page_table_stride,
        };
        step.planned_q_heads = 0;
    }

    /// Writes k and v of all tokens into the layer's cache and attends; `out` is `[T, num_q_heads * head_dim]`.
    #[allow(clippy::too_many_arguments)]
    fn forward(
        &self,
        py: Python<'_>,
        layer: usize,
        num_q_heads: usize,
        q: usize,
        q_stride: usize,
        k: usize,
        k_stride: usize,
        v: usize,
        v_stride: usize,
        out: usize,
    ) -> PyResult<()> {
        let Some(cache) = self.caches.get(layer) else {
            let layers = self.caches.len();
            return Err(PyIndexError::new_err(format!(
                "layer {layer} is beyond the {layers} layers of the cache"
            )));
        };
        let geometry = Geometry {
            num_q_heads,
            ..self.geometry
        };
        let mut step = lock(&self.step);
        if num_q_heads == 0 || !num_q_heads.is_multiple_of(geometry.num_kv_heads) {
            return Err(PyValueError::new_err(format!(
                "{num_q_heads} query heads must be a positive multiple of the {} key heads",
                geometry.num_kv_heads
            )));
        }
        let Step {
            arrays,
            plan,
            planned_q_heads,
        } = &mut *step;
        if arrays.num_tokens == 0 {
            return Ok(());
        }
        // SAFETY: `begin` was given arrays that outlive the step.
        let batch = unsafe { arrays.batch() };
        if *planned_q_heads != num_q_heads {
            plan.rebuild(&geometry, &batch);
            *planned_q_heads = num_q_heads;
        }
        let (tokens, q_cols) = (arrays.num_tokens, num_q_heads * geometry.head_dim);
        let kv_cols = geometry.num_kv_heads * geometry.head_dim;
        let tensors = Tensors {
            q: source(q, q_stride, tokens, q_cols, self.dtype),
            k: source(k, k_stride, tokens, kv_cols, self.dtype),
            v: source(v, v_stride, tokens, kv_cols, self.dtype),
            out: target(out, q_cols, tokens, q_cols, self.dtype),
            cache: LayerCache {
                ptr: *cache as *mut u8,
                dtype: self.dtype,
            },
        };
        let work = plan.work() * q_cols;
        let run = || {
            let Runtime { level, threads } = &*self.runtime;
            // SAFETY: the wrapper checked shapes and types; page ids come from the scheduler.
            unsafe {
                attend(
                    *level,
                    threads,
                    &self.workspace,
                    &geometry,
                    plan,
                    &batch,
                    &tensors,
                )
            };
        };
        if work < DETACH_WORK {
            run()
        } else {
            py.detach(run)
        }
        Ok(())
    }
}
