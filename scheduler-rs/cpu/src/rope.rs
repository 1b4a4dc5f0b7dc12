//! Rotary position embedding, in place.
use crate::dtype::{Element, load_partial, store_partial};
use crate::matrix::MatrixMut;
use crate::simd::{Kernel, LANES, Level, Simd};
use crate::threads::Threads;
use crate::with_element;

/// Elements below which one thread does the work.
const SERIAL: usize = 64 << 10;

/// Rows to rotate: each row holds heads of `head_dim` side by side.
#[derive(Clone, Copy, Debug)]
pub struct Rope {
    /// Query and key rows, `[tokens, heads * head_dim]`, both of one storage type.
    pub heads: [MatrixMut; 2],
    /// Elements of a head; even.
    pub head_dim: usize,
    /// Position of each token, int32.
    pub positions: *const i32,
    /// fp32 `[max_positions, 2, head_dim / 2]`: cosines, then sines.
    pub cos_sin: *const f32,
}

// SAFETY: tasks touch disjoint rows.
unsafe impl Sync for Rope {}
// SAFETY: as above.
unsafe impl Send for Rope {}

/// Rotates the pairs (i, i + head_dim / 2) of every head: (a cos - b sin, b cos + a sin), in fp32, rounded once.
///
/// # Safety
/// The matrices are valid, positions index `cos_sin`, and the CPU has `level`.
pub unsafe fn rope(level: Level, threads: &Threads, rope: Rope) {
    let rows = rope.heads[0].rows;
    let work = rows * (rope.heads[0].cols + rope.heads[1].cols);
    let blocks = if work < SERIAL {
        1
    } else {
        rows.min(4 * threads.count())
    };
    let rope = &rope;
    threads.run(blocks, &|_, block| {
        with_element!(rope.heads[0].dtype, E, {
            level.run(RotateRows::<E> {
                rope,
                first: rows * block / blocks,
                end: rows * (block + 1) / blocks,
                marker: std::marker::PhantomData,
            });
        });
    });
}

struct RotateRows<'a, E> {
    rope: &'a Rope,
    first: usize,
    end: usize,
    marker: std::marker::PhantomData<E>,
}

impl<E: Element> Kernel for RotateRows<'_, E> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let half = self.rope.head_dim / 2;
        for row in self.first..self.end {
            let position = *self.rope.positions.add(row) as usize;
            let cos = self.rope.cos_sin.add(position * 2 * half);
            for matrix in self.rope.heads {
                for head in 0..matrix.cols / self.rope.head_dim {
                    rotate::<S, E>(
                        matrix.row::<E>(row).add(head * self.rope.head_dim),
                        cos,
                        half,
                    );
                }
            }
        }
    }
}

#[inline(always)]
unsafe fn rotate<S: Simd, E: Element>(head: *mut E, cos: *const f32, half: usize) {
    for i in (0..half).step_by(LANES) {
        let count = (half - i).min(LANES);
        let a = load_partial::<S, E>(head.add(i), count);
        let b = load_partial::<S, E>(head.add(half + i), count);
        let c = load_partial::<S, f32>(cos.add(i), count);
        let s = load_partial::<S, f32>(cos.add(half + i), count);
        let minus_bs = S::sub(S::splat(0.0), S::mul(b, s));
        store_partial::<S, E>(head.add(i), S::fma(a, c, minus_bs), count);
        store_partial::<S, E>(head.add(half + i), S::fma(b, c, S::mul(a, s)), count);
    }
}
