//! y = x W^T + b over packed panels.
//!
//! Each output is one chain of fused multiply-adds over the input features in order, in fp32, started at zero; the
//! bias is added last. Tiling only decides which chains run side by side.
use crate::buffer::AlignedBuffer;
use crate::dtype::{Dtype, Element, load_partial, store_partial};
use crate::matrix::{Matrix, MatrixMut};
use crate::panels::PackedWeight;
use crate::simd::{Kernel, LANES, Level, Simd};
use crate::threads::Threads;
use crate::tile::{Panels, Rows, accumulate, tile_start, with_rows};
use crate::with_element;

/// Bytes of fp32 input rows that should stay in the second-level cache while panels stream past.
const ROW_BLOCK_BYTES: usize = 192 << 10;
/// Elements below which the input is widened by one thread.
const SERIAL_WIDEN: usize = 32 << 10;

/// Working memory of [`linear`], kept between calls.
#[derive(Debug)]
pub struct Workspace {
    widened: AlignedBuffer,
}

impl Default for Workspace {
    fn default() -> Self {
        Workspace {
            widened: AlignedBuffer::zeroed(1 << 16),
        }
    }
}

/// Writes y `[rows, out]` = x `[rows, in]` W^T + b. The storage types of x, W and y are independent.
///
/// # Safety
/// x is readable, y writable and they do not overlap; the CPU has `level`; `x.cols` and `y.cols` are W's sizes.
pub unsafe fn linear(
    level: Level,
    threads: &Threads,
    workspace: &mut Workspace,
    x: Matrix,
    weight: &PackedWeight,
    y: MatrixMut,
) {
    debug_assert!(
        x.cols == weight.in_features() && y.cols == weight.out_features() && x.rows == y.rows
    );
    if x.rows == 0 {
        return;
    }
    let rows = widen(level, threads, workspace, x);
    let grid = Grid::new(x.rows, x.cols, y.cols.div_ceil(LANES), threads.count());
    let product = Product {
        rows,
        weight,
        y,
        grid,
    };
    with_element!(
        weight.dtype(),
        E,
        threads.run(grid.tasks(), &|_, task| {
            level.run(Task::<E> {
                product: &product,
                task,
                marker: std::marker::PhantomData,
            });
        })
    );
}

/// How the output is cut: blocks of rows times groups of panels.
#[derive(Clone, Copy)]
struct Grid {
    rows: usize,
    row_blocks: usize,
    panels: usize,
    panel_groups: usize,
}

impl Grid {
    fn new(rows: usize, depth: usize, panels: usize, threads: usize) -> Grid {
        let block = (ROW_BLOCK_BYTES / (4 * depth.max(1))).clamp(12, 192);
        let row_blocks = rows.div_ceil(block);
        let wanted = (8 * threads).div_ceil(row_blocks);
        let panel_groups = panels.div_ceil(2).min(wanted.max(1));
        Grid {
            rows,
            row_blocks,
            panels,
            panel_groups,
        }
    }

    fn tasks(&self) -> usize {
        self.row_blocks * self.panel_groups
    }
}

struct Product<'a> {
    rows: Rows,
    weight: &'a PackedWeight,
    y: MatrixMut,
    grid: Grid,
}

// SAFETY: tasks read x and W and write disjoint parts of y.
unsafe impl Sync for Product<'_> {}

struct Task<'a, E> {
    product: &'a Product<'a>,
    task: usize,
    marker: std::marker::PhantomData<E>,
}

impl<E: Element> Kernel for Task<'_, E> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Grid {
            rows,
            row_blocks,
            panels,
            panel_groups,
        } = self.product.grid;
        let (block, group) = (self.task / panel_groups, self.task % panel_groups);
        let (first_row, end_row) = (rows * block / row_blocks, rows * (block + 1) / row_blocks);
        let (first, end) = (
            panels * group / panel_groups,
            panels * (group + 1) / panel_groups,
        );
        let count = end_row - first_row;
        match count {
            1 => span::<S, E, 1, 4>(self.product, first_row, first, end),
            2 => span::<S, E, 2, 2>(self.product, first_row, first, end),
            3 => span::<S, E, 3, 1>(self.product, first_row, first, end),
            _ => {
                for panel in first..end {
                    for tile in 0..count.div_ceil(crate::tile::MAX_ROWS) {
                        let from = first_row + tile_start(count, tile);
                        let to = first_row + tile_start(count, tile + 1);
                        with_rows!(
                            to - from,
                            MR,
                            block_of::<S, E, MR, 1, true>(self.product, from, panel)
                        );
                    }
                }
            }
        }
    }
}

/// Panels `first..end` for the `MR` rows from `row` on, `NP` panels at a time.
#[inline(always)]
unsafe fn span<S: Simd, E: Element, const MR: usize, const NP: usize>(
    product: &Product<'_>,
    row: usize,
    first: usize,
    end: usize,
) {
    let mut panel = first;
    while panel + NP <= end {
        block_of::<S, E, MR, NP, true>(product, row, panel);
        panel += NP;
    }
    while panel < end {
        block_of::<S, E, MR, 1, true>(product, row, panel);
        panel += 1;
    }
}

#[inline(always)]
unsafe fn block_of<S: Simd, E: Element, const MR: usize, const NP: usize, const FETCH: bool>(
    product: &Product<'_>,
    row: usize,
    panel: usize,
) {
    let depth = product.weight.in_features();
    let panels = Panels {
        ptr: product.weight.panels::<E>(),
        stride: depth * LANES,
    };
    let x = Rows {
        ptr: product.rows.ptr.add(row * product.rows.stride),
        stride: product.rows.stride,
    };
    let mut acc = [[S::splat(0.0); NP]; MR];
    accumulate::<S, E, MR, NP, FETCH>(x, panels.skip(panel), depth, &mut acc);
    let bias = product.weight.bias();
    for (r, lanes) in acc.iter().enumerate() {
        for (p, value) in lanes.iter().enumerate() {
            let column = (panel + p) * LANES;
            let value = if bias.is_empty() {
                *value
            } else {
                S::add(*value, S::load(bias.as_ptr().add(column)))
            };
            store_columns::<S>(product.y, row + r, column, value);
        }
    }
}

#[inline(always)]
unsafe fn store_columns<S: Simd>(y: MatrixMut, row: usize, column: usize, value: S::F) {
    let count = (y.cols - column).min(LANES);
    with_element!(
        y.dtype,
        E,
        store_partial::<S, E>(y.row::<E>(row).add(column), value, count)
    );
}

/// The input as fp32 rows: x itself when it is that already.
unsafe fn widen(level: Level, threads: &Threads, workspace: &mut Workspace, x: Matrix) -> Rows {
    if x.dtype == Dtype::F32 {
        return Rows {
            ptr: x.ptr.cast(),
            stride: x.stride,
        };
    }
    // rows start 16 elements off whole pages, so that the rows of a tile do not share a cache set
    let stride = x.cols.next_multiple_of(LANES) + LANES;
    workspace.widened.reserve(x.rows * stride * 4);
    let target = MatrixMut {
        ptr: workspace.widened.as_mut_ptr(),
        stride,
        rows: x.rows,
        cols: x.cols,
        dtype: Dtype::F32,
    };
    let blocks = if x.rows * x.cols < SERIAL_WIDEN {
        1
    } else {
        threads.count()
    };
    threads.run(blocks, &|_, block| {
        level.run(Widen {
            x,
            target,
            first: x.rows * block / blocks,
            end: x.rows * (block + 1) / blocks,
        });
    });
    Rows {
        ptr: target.ptr.cast(),
        stride,
    }
}

struct Widen {
    x: Matrix,
    target: MatrixMut,
    first: usize,
    end: usize,
}

impl Kernel for Widen {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        with_element!(self.x.dtype, E, {
            for row in self.first..self.end {
                let (from, to) = (self.x.row::<E>(row), self.target.row::<f32>(row));
                for column in (0..self.x.cols).step_by(LANES) {
                    let count = (self.x.cols - column).min(LANES);
                    store_partial::<S, f32>(
                        to.add(column),
                        load_partial::<S, E>(from.add(column), count),
                        count,
                    );
                }
            }
        });
    }
}
