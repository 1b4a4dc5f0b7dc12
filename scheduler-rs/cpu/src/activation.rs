//! The gated activation of the feed-forward block.
use crate::dtype::{Element, load_partial, store_partial};
use crate::math::exp;
use crate::matrix::{Matrix, MatrixMut};
use crate::simd::{Kernel, LANES, Level, Simd};
use crate::threads::Threads;
use crate::with_element;

/// Elements below which one thread does the work.
const SERIAL: usize = 16 << 10;

/// y `[rows, n]` = silu(gate) * up, gate and up being the halves of x `[rows, 2 n]`; fp32 inside, silu rounded to the
/// storage type before the product, as separate operations would.
///
/// # Safety
/// x and y have one storage type, `x.cols == 2 * y.cols`, and are valid; the CPU has `level`.
pub unsafe fn silu_and_mul(level: Level, threads: &Threads, x: Matrix, y: MatrixMut) {
    debug_assert!(x.cols == 2 * y.cols && x.rows == y.rows);
    let rows = x.rows;
    let blocks = if rows * y.cols < SERIAL {
        1
    } else {
        rows.min(4 * threads.count())
    };
    threads.run(blocks, &|_, block| {
        with_element!(x.dtype, E, {
            level.run(GateRows::<E> {
                x,
                y,
                first: rows * block / blocks,
                end: rows * (block + 1) / blocks,
                marker: std::marker::PhantomData,
            });
        });
    });
}

struct GateRows<E> {
    x: Matrix,
    y: MatrixMut,
    first: usize,
    end: usize,
    marker: std::marker::PhantomData<E>,
}

impl<E: Element> Kernel for GateRows<E> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let cols = self.y.cols;
        for row in self.first..self.end {
            let (gate, y) = (self.x.row::<E>(row), self.y.row::<E>(row));
            let up = gate.add(cols);
            for column in (0..cols).step_by(LANES) {
                let count = (cols - column).min(LANES);
                let value = load_partial::<S, E>(gate.add(column), count);
                let denominator = S::add(S::splat(1.0), exp::<S>(S::sub(S::splat(0.0), value)));
                let silu = E::rounded::<S>(S::div(value, denominator));
                store_partial::<S, E>(
                    y.add(column),
                    S::mul(silu, load_partial::<S, E>(up.add(column), count)),
                    count,
                );
            }
        }
    }
}
