//! Root-mean-square normalisation.
use crate::dtype::{Element, load_partial, store_partial};
use crate::matrix::{Matrix, MatrixMut};
use crate::simd::{Kernel, LANES, Level, Simd};
use crate::threads::Threads;
use crate::with_element;

/// Elements below which one thread does the work.
const SERIAL: usize = 64 << 10;

/// Rows to normalise, and optionally the residual stream they join first.
#[derive(Clone, Copy, Debug)]
pub struct RmsNorm {
    /// Input rows.
    pub x: Matrix,
    /// When given: `residual += x` first, rounded to the storage type; the sum is what is normalised.
    pub residual: Option<MatrixMut>,
    /// One scale per column, in x's storage type.
    pub weight: *const u8,
    /// Output rows.
    pub y: MatrixMut,
    /// Added to the mean square.
    pub eps: f32,
}

// SAFETY: tasks touch disjoint rows.
unsafe impl Sync for RmsNorm {}
// SAFETY: as above.
unsafe impl Send for RmsNorm {}

/// y = round(x / sqrt(mean(x^2) + eps)) * weight per row: the quotient is rounded to the storage type before the
/// scale, as in Hugging Face's `LlamaRMSNorm`. Squares are summed in 16 lanes over the row, then by halving.
///
/// # Safety
/// All matrices have one shape and one storage type, and are valid; the CPU has `level`.
pub unsafe fn rms_norm(level: Level, threads: &Threads, norm: RmsNorm) {
    let rows = norm.x.rows;
    let blocks = if rows * norm.x.cols < SERIAL {
        1
    } else {
        rows.min(4 * threads.count())
    };
    let norm = &norm;
    threads.run(blocks, &|_, block| {
        with_element!(norm.x.dtype, E, {
            level.run(NormRows::<E> {
                norm,
                first: rows * block / blocks,
                end: rows * (block + 1) / blocks,
                marker: std::marker::PhantomData,
            });
        });
    });
}

struct NormRows<'a, E> {
    norm: &'a RmsNorm,
    first: usize,
    end: usize,
    marker: std::marker::PhantomData<E>,
}

impl<E: Element> Kernel for NormRows<'_, E> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        for row in self.first..self.end {
            norm_row::<S, E>(self.norm, row);
        }
    }
}

#[inline(always)]
unsafe fn norm_row<S: Simd, E: Element>(norm: &RmsNorm, row: usize) {
    let cols = norm.x.cols;
    let x = match norm.residual {
        Some(residual) => add_row::<S, E>(norm.x.row(row), residual.row(row), cols),
        None => norm.x.row::<E>(row),
    };
    let mut squares = S::splat(0.0);
    for column in (0..cols).step_by(LANES) {
        let value = load_partial::<S, E>(x.add(column), (cols - column).min(LANES));
        squares = S::fma(value, value, squares);
    }
    let scale = S::splat(1.0 / (S::sum(squares) / cols as f32 + norm.eps).sqrt());
    let (weight, y) = (norm.weight.cast::<E>(), norm.y.row::<E>(row));
    for column in (0..cols).step_by(LANES) {
        let count = (cols - column).min(LANES);
        let normal = E::rounded::<S>(S::mul(load_partial::<S, E>(x.add(column), count), scale));
        let scaled = S::mul(load_partial::<S, E>(weight.add(column), count), normal);
        store_partial::<S, E>(y.add(column), scaled, count);
    }
}

#[inline(always)]
unsafe fn add_row<S: Simd, E: Element>(x: *const E, residual: *mut E, cols: usize) -> *const E {
    for column in (0..cols).step_by(LANES) {
        let count = (cols - column).min(LANES);
        let sum = S::add(
            load_partial::<S, E>(x.add(column), count),
            load_partial::<S, E>(residual.add(column), count),
        );
        store_partial::<S, E>(residual.add(column), sum, count);
    }
    residual
}
