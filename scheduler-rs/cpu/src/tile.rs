//! The inner loop of every product: MR rows times NP panels of 16 columns.
use crate::dtype::Element;
use crate::simd::{LANES, Simd};

/// Panels of `[depth][16]` elements, `stride` elements apart.
#[derive(Clone, Copy)]
pub(crate) struct Panels<E> {
    pub ptr: *const E,
    pub stride: usize,
}

impl<E> Panels<E> {
    /// The panels from number `index` on.
    #[inline(always)]
    pub unsafe fn skip(self, index: usize) -> Self {
        Panels {
            ptr: self.ptr.add(index * self.stride),
            stride: self.stride,
        }
    }
}

/// fp32 rows, `stride` elements apart.
#[derive(Clone, Copy)]
pub(crate) struct Rows {
    pub ptr: *const f32,
    pub stride: usize,
}

/// Elements ahead of the current one that a panel is prefetched.
const PREFETCH_AHEAD: usize = 1024;

/// `acc[r][p] += sum over i of x[r][i] * panel[p][i]`, one fused chain per lane in order of i.
///
/// `FETCH` asks for panel memory ahead of use: for panels that stream from memory.
#[inline(always)]
#[allow(clippy::needless_range_loop)] // constant bounds: the loops unroll and the arrays stay in registers
pub(crate) unsafe fn accumulate<
    S: Simd,
    E: Element,
    const MR: usize,
    const NP: usize,
    const FETCH: bool,
>(
    x: Rows,
    panels: Panels<E>,
    depth: usize,
    acc: &mut [[S::F; NP]; MR],
) {
    for i in 0..depth {
        let at = panels.ptr.add(i * LANES);
        let mut weights = [S::splat(0.0); NP];
        for p in 0..NP {
            if FETCH {
                S::prefetch(at.wrapping_add(p * panels.stride + PREFETCH_AHEAD).cast());
            }
            weights[p] = E::load::<S>(at.add(p * panels.stride));
        }
        for r in 0..MR {
            let value = S::splat(*x.ptr.add(r * x.stride + i));
            for p in 0..NP {
                acc[r][p] = S::fma(value, weights[p], acc[r][p]);
            }
        }
    }
}

/// Calls `$body` with `$rows` bound to the constant equal to `$count` (1..=6).
macro_rules! with_rows {
    ($count:expr, $rows:ident, $body:expr) => {
        match $count {
            1 => with_rows!(@one 1, $rows, $body),
            2 => with_rows!(@one 2, $rows, $body),
            3 => with_rows!(@one 3, $rows, $body),
            4 => with_rows!(@one 4, $rows, $body),
            5 => with_rows!(@one 5, $rows, $body),
            _ => with_rows!(@one 6, $rows, $body),
        }
    };
    (@one $n:literal, $rows:ident, $body:expr) => {{
        const $rows: usize = $n;
        $body
    }};
}
pub(crate) use with_rows;

/// Most rows of one tile.
pub(crate) const MAX_ROWS: usize = 6;

/// Start of tile `index` when `rows` rows are split evenly into `ceil(rows / MAX_ROWS)` tiles.
#[inline(always)]
pub(crate) fn tile_start(rows: usize, index: usize) -> usize {
    let tiles = rows.div_ceil(MAX_ROWS);
    rows * index / tiles
}
