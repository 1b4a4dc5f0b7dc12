//! y = x W^T + b over quantised weights, with the input in eight bits.
//!
//! Each row of x is quantised by groups of 32 features (scale: greatest magnitude / 127). A group's products are summed
//! as integers, which is exact in any order, and its sum enters the output's fp32 chain with both scales, groups in
//! order. So a result depends neither on the number of rows nor on threads or vector unit.
use crate::buffer::AlignedBuffer;
use crate::dtype::{Element, load_partial, store_partial};
use crate::matrix::{Matrix, MatrixMut};
use crate::quant::{Bits, GROUP, OFFSET, QuantWeight};
use crate::simd::{Kernel, LANES, Level, Simd};
use crate::threads::Threads;
use crate::tile::{MAX_ROWS, tile_start, with_rows};
use crate::with_element;

/// Rows of x that one task works through.
const ROW_BLOCK: usize = 96;
/// Elements below which the input is quantised by one thread.
const SERIAL: usize = 32 << 10;
/// Bytes ahead of the current block that a panel is prefetched.
const PREFETCH_AHEAD: usize = 2048;

/// The quantised rows of x, kept between calls.
#[derive(Debug)]
pub struct QuantWorkspace {
    rows: AlignedBuffer,
}

impl Default for QuantWorkspace {
    fn default() -> Self {
        QuantWorkspace {
            rows: AlignedBuffer::zeroed(1 << 16),
        }
    }
}

/// Rows of x: by row `[in]` bytes, then for each group d, d times the sum of the bytes, and that sum times `OFFSET`.
#[derive(Clone, Copy)]
struct QuantRows {
    ptr: *mut u8,
    stride: usize,
    groups: usize,
}

impl QuantRows {
    fn stride(groups: usize) -> usize {
        (groups * (GROUP + 12)).next_multiple_of(64) + 64
    }

    #[inline(always)]
    unsafe fn bytes(&self, row: usize) -> *mut u8 {
        self.ptr.add(row * self.stride)
    }

    #[inline(always)]
    unsafe fn scales(&self, row: usize) -> *mut f32 {
        self.bytes(row).add(self.groups * GROUP).cast()
    }

    #[inline(always)]
    unsafe fn sums(&self, row: usize) -> *mut f32 {
        self.scales(row).add(self.groups)
    }

    #[inline(always)]
    unsafe fn offsets(&self, row: usize) -> *mut u32 {
        self.sums(row).add(self.groups).cast()
    }
}

/// Writes y `[rows, out]` = x `[rows, in]` W^T + b. The storage types of x and y are independent.
///
/// # Safety
/// x is readable, y writable and they do not overlap; the CPU has `level`; `x.cols` and `y.cols` are W's sizes.
pub unsafe fn quant_linear(
    level: Level,
    threads: &Threads,
    workspace: &mut QuantWorkspace,
    x: Matrix,
    weight: &QuantWeight,
    y: MatrixMut,
) {
    debug_assert!(
        x.cols == weight.in_features() && y.cols == weight.out_features() && x.rows == y.rows
    );
    if x.rows == 0 {
        return;
    }
    let rows = quantize(level, threads, workspace, x);
    let (row_blocks, panels) = (x.rows.div_ceil(ROW_BLOCK), y.cols.div_ceil(LANES));
    let wanted = (8 * threads.count()).div_ceil(row_blocks);
    let panel_groups = panels.div_ceil(2).min(wanted.max(1));
    let product = Product {
        rows,
        weight,
        y,
        row_blocks,
        panels,
        panel_groups,
    };
    threads.run(row_blocks * panel_groups, &|_, task| {
        let product = &product;
        match weight.bits() {
            Bits::Four => level.run(Task::<true> { product, task }),
            Bits::Eight => level.run(Task::<false> { product, task }),
        }
    });
}

struct Product<'a> {
    rows: QuantRows,
    weight: &'a QuantWeight,
    y: MatrixMut,
    row_blocks: usize,
    panels: usize,
    panel_groups: usize,
}

// SAFETY: tasks read x and W and write disjoint parts of y.
unsafe impl Sync for Product<'_> {}

struct Task<'a, const FOUR: bool> {
    product: &'a Product<'a>,
    task: usize,
}

impl<const FOUR: bool> Kernel for Task<'_, FOUR> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let product = self.product;
        let (block, group) = (
            self.task / product.panel_groups,
            self.task % product.panel_groups,
        );
        let rows = product.y.rows;
        let first_row = rows * block / product.row_blocks;
        let count = rows * (block + 1) / product.row_blocks - first_row;
        let first = product.panels * group / product.panel_groups;
        let end = product.panels * (group + 1) / product.panel_groups;
        for panel in first..end {
            for tile in 0..count.div_ceil(MAX_ROWS) {
                let from = first_row + tile_start(count, tile);
                let to = first_row + tile_start(count, tile + 1);
                with_rows!(to - from, MR, block_of::<S, MR, FOUR>(product, from, panel));
            }
        }
    }
}

/// The outputs of one panel for the `MR` rows from `row` on.
#[inline(always)]
#[allow(clippy::needless_range_loop)] // constant bounds: the loops unroll and the arrays stay in registers
unsafe fn block_of<S: Simd, const MR: usize, const FOUR: bool>(
    product: &Product<'_>,
    row: usize,
    panel: usize,
) {
    let bits = if FOUR { Bits::Four } else { Bits::Eight };
    let (rows, groups) = (product.rows, product.rows.groups);
    let panel_start = product
        .weight
        .blocks()
        .add(panel * groups * bits.block_bytes());
    let mut acc = [S::splat(0.0); MR];
    for group in 0..groups {
        let block = panel_start.add(group * bits.block_bytes());
        for line in 0..bits.block_bytes().div_ceil(64) {
            S::prefetch(block.wrapping_add(PREFETCH_AHEAD + 64 * line));
        }
        let d = S::load_f16(block.cast());
        let weights = unpack::<S, FOUR>(block);
        for r in 0..MR {
            let x = rows.bytes(row + r).add(group * GROUP).cast::<u32>();
            let mut even = S::splat_u(0);
            let mut odd = S::splat_u(0);
            for i in 0..GROUP / 8 {
                let (first, second) = (
                    S::splat_u(x.add(2 * i).read_unaligned()),
                    S::splat_u(x.add(2 * i + 1).read_unaligned()),
                );
                if FOUR {
                    even = S::dot(even, weights[2 * i], first);
                    odd = S::dot(odd, weights[2 * i + 1], second);
                } else {
                    even = S::dot_u8(even, weights[2 * i], first);
                    odd = S::dot_u8(odd, weights[2 * i + 1], second);
                }
            }
            let mut total = S::add_u(even, odd);
            if !FOUR {
                total = S::sub_u(total, S::splat_u(*rows.offsets(row + r).add(group)));
            }
            let scale = S::mul(d, S::splat(*rows.scales(row + r).add(group)));
            acc[r] = S::fma(S::i32_to_f32(total), scale, acc[r]);
            if FOUR {
                let m = S::load_f16(block.cast::<u16>().add(LANES));
                acc[r] = S::fma(m, S::splat(*rows.sums(row + r).add(group)), acc[r]);
            }
        }
    }
    let (bias, column, y) = (product.weight.bias(), panel * LANES, product.y);
    let count = (y.cols - column).min(LANES);
    for r in 0..MR {
        let value = if bias.is_empty() {
            acc[r]
        } else {
            S::add(acc[r], S::load(bias.as_ptr().add(column)))
        };
        with_element!(
            y.dtype,
            E,
            store_partial::<S, E>(y.row::<E>(row + r).add(column), value, count)
        );
    }
}

/// The weights of a block, vector i those of features 4 i .. 4 i + 4.
#[inline(always)]
unsafe fn unpack<S: Simd, const FOUR: bool>(block: *const u8) -> [S::U; GROUP / 4] {
    let mut out = [S::splat_u(0); GROUP / 4];
    if FOUR {
        let packed = block.add(4 * LANES).cast::<u32>();
        let low = S::splat_u(0x0f0f_0f0f);
        for i in 0..GROUP / 8 {
            let both = S::load_u(packed.add(i * LANES));
            out[2 * i] = S::and_u(both, low);
            out[2 * i + 1] = S::and_u(S::shr_u::<4>(both), low);
        }
    } else {
        let packed = block.add(2 * LANES).cast::<u32>();
        for (i, vector) in out.iter_mut().enumerate() {
            *vector = S::load_u(packed.add(i * LANES));
        }
    }
    out
}

unsafe fn quantize(
    level: Level,
    threads: &Threads,
    workspace: &mut QuantWorkspace,
    x: Matrix,
) -> QuantRows {
    let groups = x.cols / GROUP;
    let stride = QuantRows::stride(groups);
    workspace.rows.reserve(x.rows * stride);
    let rows = QuantRows {
        ptr: workspace.rows.as_mut_ptr(),
        stride,
        groups,
    };
    let blocks = if x.rows * x.cols < SERIAL {
        1
    } else {
        threads.count().min(x.rows)
    };
    let job = Quantize {
        x,
        rows,
        first: 0,
        end: x.rows,
    };
    threads.run(blocks, &|_, block| {
        let job = &job;
        level.run(Quantize {
            first: x.rows * block / blocks,
            end: x.rows * (block + 1) / blocks,
            ..*job
        });
    });
    rows
}

#[derive(Clone, Copy)]
struct Quantize {
    x: Matrix,
    rows: QuantRows,
    first: usize,
    end: usize,
}

// SAFETY: plain addresses; every thread writes its own rows.
unsafe impl Sync for Quantize {}

impl Kernel for Quantize {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        with_element!(self.x.dtype, E, {
            for row in self.first..self.end {
                for group in 0..self.rows.groups {
                    let from = self.x.row::<E>(row).add(group * GROUP);
                    quantize_group::<S, E>(from, self.rows, row, group);
                }
            }
        });
    }
}

#[inline(always)]
unsafe fn quantize_group<S: Simd, E: Element>(
    from: *const E,
    rows: QuantRows,
    row: usize,
    group: usize,
) {
    let mut values = [S::splat(0.0); GROUP / LANES];
    let mut most = S::splat(0.0);
    for (i, lanes) in values.iter_mut().enumerate() {
        *lanes = load_partial::<S, E>(from.add(i * LANES), LANES);
        let negated = S::sub(S::splat(0.0), *lanes);
        most = S::max(most, S::max(*lanes, negated));
    }
    let most = S::max_lane(most);
    let inverse = if most > 0.0 { 127.0 / most } else { 0.0 };
    let mut total = 0i32;
    let bytes = rows.bytes(row).add(group * GROUP);
    for (i, lanes) in values.iter().enumerate() {
        let steps = S::f32_to_i32(S::round(S::mul(*lanes, S::splat(inverse))));
        let mut wide = [0u32; LANES];
        S::store_u(wide.as_mut_ptr(), steps);
        for (lane, value) in wide.iter().enumerate() {
            let value = (*value as i32).clamp(-127, 127);
            *bytes.add(i * LANES + lane) = value as u8;
            total += value;
        }
    }
    let scale = most / 127.0;
    *rows.scales(row).add(group) = scale;
    *rows.sums(row).add(group) = scale * total as f32;
    *rows.offsets(row).add(group) = (total * OFFSET) as u32;
}
