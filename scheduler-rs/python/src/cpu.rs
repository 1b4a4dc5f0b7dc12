//! CPU kernels for Python: addresses, strides (in elements) and sizes in, nothing allocated here but packed weights.
//!
//! Every pointer argument is the address of memory that the caller keeps alive and shaped as stated; the wrappers in
//! `sonar_engine.layers.native` and `sonar_engine.attention.native_attention` check shapes and types.
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use sonar_cpu::activation::silu_and_mul;
use sonar_cpu::dtype::Dtype;
use sonar_cpu::gemm::{self, linear};
use sonar_cpu::matrix::{Matrix, MatrixMut};
use sonar_cpu::norm::{RmsNorm, rms_norm};
use sonar_cpu::panels::PackedWeight;
use sonar_cpu::quant::{Bits, GROUP, QuantWeight};
use sonar_cpu::quant_gemm::{QuantWorkspace, quant_linear};
use sonar_cpu::rope::{Rope, rope};
use sonar_cpu::sample::{GumbelRows, gumbel_argmax};
use sonar_cpu::simd::Level;
use sonar_cpu::threads::Threads;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Multiply-adds from which a call lets other Python threads run meanwhile. Below, handing the interpreter over
/// costs more than it gives.
pub(crate) const DETACH_WORK: usize = 1 << 28;

/// Adds the classes of this file to the extension module.
pub fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_class::<CpuKernels>()?;
    m.add_class::<CpuWeight>()?;
    m.add_class::<crate::cpu_attention::CpuAttention>()
}

/// 0: float32, 1: bfloat16, 2: float16.
pub(crate) fn dtype(code: u8) -> PyResult<Dtype> {
    match code {
        0 => Ok(Dtype::F32),
        1 => Ok(Dtype::Bf16),
        2 => Ok(Dtype::F16),
        _ => Err(PyValueError::new_err(format!(
            "dtype code {code} is unknown: 0 float32, 1 bfloat16, 2 float16"
        ))),
    }
}

/// A lock whose data stays usable after a panic elsewhere: it only holds scratch memory.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The vector level and the team of threads.
pub(crate) struct Runtime {
    pub level: Level,
    pub threads: Threads,
}

/// A weight matrix in the kernels' own layout.
#[pyclass(frozen, module = "sonar_engine._scheduler")]
pub struct CpuWeight {
    packed: Packed,
}

enum Packed {
    Plain(PackedWeight),
    Quantized(QuantWeight),
}

impl Packed {
    /// (out_features, in_features)
    fn shape(&self) -> (usize, usize) {
        match self {
            Packed::Plain(weight) => (weight.out_features(), weight.in_features()),
            Packed::Quantized(weight) => (weight.out_features(), weight.in_features()),
        }
    }
}

#[pymethods]
impl CpuWeight {
    /// Bytes held.
    #[getter]
    fn num_bytes(&self) -> usize {
        match &self.packed {
            Packed::Plain(weight) => weight.num_bytes(),
            Packed::Quantized(weight) => weight.num_bytes(),
        }
    }

    /// A row of a quantised weight as the product sees it.
    fn dequantized(&self, row: usize) -> PyResult<Vec<f32>> {
        match &self.packed {
            Packed::Quantized(weight) if row < weight.out_features() => Ok(weight.dequantized(row)),
            Packed::Quantized(_) => Err(PyValueError::new_err(format!("there is no row {row}"))),
            Packed::Plain(_) => Err(PyValueError::new_err("this weight is not quantised")),
        }
    }
}

/// Row-wise operations and products over packed weights.
#[pyclass(frozen, module = "sonar_engine._scheduler")]
pub struct CpuKernels {
    pub(crate) runtime: Arc<Runtime>,
    workspace: Mutex<gemm::Workspace>,
    quant_workspace: Mutex<QuantWorkspace>,
}

#[pymethods]
impl CpuKernels {
    /// Kernels on a team of `num_threads`; `force_scalar` takes the portable code path, for tests.
    #[new]
    #[pyo3(signature = (num_threads, force_scalar = false))]
    fn new(num_threads: usize, force_scalar: bool) -> CpuKernels {
        let level = if force_scalar {
            Level::Scalar
        } else {
            Level::detect()
        };
        CpuKernels {
            runtime: Arc::new(Runtime {
                level,
                threads: Threads::new(num_threads),
            }),
            workspace: Mutex::default(),
            quant_workspace: Mutex::default(),
        }
    }

    /// Name of the vector level in use.
    #[getter]
    fn level(&self) -> &'static str {
        self.runtime.level.name()
    }

    /// Packs a weight `[out_features, in_features]`; `bias` is fp32 `[out_features]`, 0 for none. `bits` 4 or 8
    /// quantises it in groups of 32 input features, 0 keeps it as it is.
    #[allow(clippy::too_many_arguments)]
    #[pyo3(signature = (weight, stride, out_features, in_features, dtype_code, bias, bits = 0))]
    fn pack(
        &self,
        weight: usize,
        stride: usize,
        out_features: usize,
        in_features: usize,
        dtype_code: u8,
        bias: usize,
        bits: u8,
    ) -> PyResult<CpuWeight> {
        let quantized = match bits {
            0 => None,
            4 => Some(Bits::Four),
            8 => Some(Bits::Eight),
            _ => {
                return Err(PyValueError::new_err(format!(
                    "a weight has 4 or 8 bits, or 0 for those it came with, not {bits}"
                )));
            }
        };
        let matrix = source(
            weight,
            stride,
            out_features,
            in_features,
            dtype(dtype_code)?,
        );
        // SAFETY: the caller's tensors are alive for the call.
        let packed = unsafe {
            let bias =
                (bias != 0).then(|| std::slice::from_raw_parts(bias as *const f32, out_features));
            match quantized {
                None => Packed::Plain(PackedWeight::pack(matrix, bias)),
                Some(bits) => {
                    Packed::Quantized(QuantWeight::pack(matrix, bias, bits).ok_or_else(|| {
                        PyValueError::new_err(format!(
                            "{in_features} input features are not whole groups of {GROUP}"
                        ))
                    })?)
                }
            }
        };
        Ok(CpuWeight { packed })
    }

    /// y `[rows, out]` = x `[rows, in]` W^T + b.
    #[allow(clippy::too_many_arguments)]
    fn linear(
        &self,
        py: Python<'_>,
        weight: &CpuWeight,
        rows: usize,
        x: usize,
        x_stride: usize,
        x_dtype: u8,
        y: usize,
        y_stride: usize,
        y_dtype: u8,
    ) -> PyResult<()> {
        let (out_features, in_features) = weight.packed.shape();
        let x = source(x, x_stride, rows, in_features, dtype(x_dtype)?);
        let y = target(y, y_stride, rows, out_features, dtype(y_dtype)?);
        let Runtime { level, threads } = &*self.runtime;
        let run = || {
            // SAFETY: the wrapper checked the shapes; the tensors outlive the call.
            unsafe {
                match &weight.packed {
                    Packed::Plain(packed) => {
                        linear(*level, threads, &mut lock(&self.workspace), x, packed, y);
                    }
                    Packed::Quantized(packed) => {
                        let workspace = &mut lock(&self.quant_workspace);
                        quant_linear(*level, threads, workspace, x, packed, y);
                    }
                }
            }
        };
        if rows * in_features * out_features < DETACH_WORK {
            run()
        } else {
            py.detach(run)
        }
        Ok(())
    }

    /// y = rms_norm(x) * weight; with `residual` not 0, `residual += x` first and the sum is normalised.
    #[allow(clippy::too_many_arguments)]
    fn rms_norm(
        &self,
        rows: usize,
        cols: usize,
        dtype_code: u8,
        x: usize,
        x_stride: usize,
        residual: usize,
        residual_stride: usize,
        weight: usize,
        y: usize,
        y_stride: usize,
        eps: f32,
    ) -> PyResult<()> {
        let dtype = dtype(dtype_code)?;
        let norm = RmsNorm {
            x: source(x, x_stride, rows, cols, dtype),
            residual: (residual != 0).then(|| target(residual, residual_stride, rows, cols, dtype)),
            weight: weight as *const u8,
            y: target(y, y_stride, rows, cols, dtype),
            eps,
        };
        // SAFETY: as in `linear`.
        unsafe { rms_norm(self.runtime.level, &self.runtime.threads, norm) };
        Ok(())
    }

    /// Rotates q `[rows, num_q_heads, head_dim]` and k in place by the angles of `positions`.
    #[allow(clippy::too_many_arguments)]
    fn rope(
        &self,
        rows: usize,
        head_dim: usize,
        dtype_code: u8,
        q: usize,
        q_stride: usize,
        num_q_heads: usize,
        k: usize,
        k_stride: usize,
        num_kv_heads: usize,
        positions: usize,
        cos_sin: usize,
    ) -> PyResult<()> {
        let dtype = dtype(dtype_code)?;
        let call = Rope {
            heads: [
                target(q, q_stride, rows, num_q_heads * head_dim, dtype),
                target(k, k_stride, rows, num_kv_heads * head_dim, dtype),
            ],
            head_dim,
            positions: positions as *const i32,
            cos_sin: cos_sin as *const f32,
        };
        // SAFETY: as in `linear`.
        unsafe { rope(self.runtime.level, &self.runtime.threads, call) };
        Ok(())
    }

    /// y `[rows, cols]` = silu(x[:, :cols]) * x[:, cols:].
    #[allow(clippy::too_many_arguments)]
    fn silu_and_mul(
        &self,
        rows: usize,
        cols: usize,
        dtype_code: u8,
        x: usize,
        x_stride: usize,
        y: usize,
        y_stride: usize,
    ) -> PyResult<()> {
        let dtype = dtype(dtype_code)?;
        let (x, y) = (
            source(x, x_stride, rows, 2 * cols, dtype),
            target(y, y_stride, rows, cols, dtype),
        );
        // SAFETY: as in `linear`.
        unsafe { silu_and_mul(self.runtime.level, &self.runtime.threads, x, y) };
        Ok(())
    }

    /// A token a row: argmax of logits * inv_temperature + Gumbel noise of (id, seed, counter); int32 into `out`.
    #[allow(clippy::too_many_arguments)]
    fn gumbel_argmax(
        &self,
        rows: usize,
        vocab: usize,
        logits: usize,
        stride: usize,
        inv_temperature: usize,
        seed_lo: usize,
        seed_hi: usize,
        counter: usize,
        out: usize,
    ) {
        // SAFETY: as in `linear`; the arrays hold one element a row.
        unsafe {
            let call = GumbelRows {
                logits: logits as *const f32,
                stride,
                vocab,
                inv_temperature: std::slice::from_raw_parts(inv_temperature as *const f32, rows),
                seed_lo: std::slice::from_raw_parts(seed_lo as *const u32, rows),
                seed_hi: std::slice::from_raw_parts(seed_hi as *const u32, rows),
                counter: std::slice::from_raw_parts(counter as *const u32, rows),
            };
            let out = std::slice::from_raw_parts_mut(out as *mut i32, rows);
            gumbel_argmax(self.runtime.level, &self.runtime.threads, &call, out);
        }
    }
}

/// A matrix at an address.
pub(crate) fn source(ptr: usize, stride: usize, rows: usize, cols: usize, dtype: Dtype) -> Matrix {
    Matrix {
        ptr: ptr as *const u8,
        stride,
        rows,
        cols,
        dtype,
    }
}

/// A writable matrix at an address.
pub(crate) fn target(
    ptr: usize,
    stride: usize,
    rows: usize,
    cols: usize,
    dtype: Dtype,
) -> MatrixMut {
    MatrixMut {
        ptr: ptr as *mut u8,
        stride,
        rows,
        cols,
        dtype,
    }
}
