//! One block of query rows against one key head.
use super::{BlockTask, CHUNK, CachePair, MAX_QUERY_ROWS};
use crate::dtype::{Element, load_partial, store_partial};
use crate::math::exp;
use crate::simd::{LANES, Simd};
use crate::tile::{MAX_ROWS, Panels, Rows, accumulate, tile_start, with_rows};

/// Working memory of a block. `width` is head_dim rounded up to whole lanes; strides are in elements.
struct Scratch {
    width: usize,
    rows: usize,
    query: *mut f32,   // [rows, width]
    output: *mut f32,  // [rows, width] sum of weight * value so far
    scores: *mut f32,  // [rows, CHUNK]
    panels: *mut f32,  // keys [CHUNK / 16][width][16], then values [width / 16][CHUNK][16]
    eight: *mut f32,   // [8, width]
    highest: *mut f32, // [rows] greatest score so far
    total: *mut f32,   // [rows] sum of weights so far
}

impl Scratch {
    #[inline(always)]
    unsafe fn new<E>(task: &mut BlockTask<'_, E>) -> Scratch {
        let width = task.geometry.head_dim.next_multiple_of(LANES);
        let rows = task.block.num_tokens * task.geometry.group();
        let row_space = rows.max(MAX_QUERY_ROWS);
        let sizes = [
            row_space * width,
            row_space * width,
            row_space * CHUNK,
            CHUNK * width,
            8 * width,
            row_space,
            row_space,
        ];
        task.scratch.reserve(sizes.iter().sum::<usize>() * 4);
        let mut next: *mut f32 = task.scratch.as_mut_ptr();
        let parts = sizes.map(|size| {
            let part = next;
            next = next.wrapping_add(size);
            part
        });
        let [query, output, scores, panels, eight, highest, total] = parts;
        Scratch {
            width,
            rows,
            query,
            output,
            scores,
            panels,
            eight,
            highest,
            total,
        }
    }
}

#[inline(always)]
pub(super) unsafe fn attend_block<S: Simd, E: Element>(mut task: BlockTask<'_, E>) {
    let scratch = Scratch::new(&mut task);
    load_queries::<S, E>(&task, &scratch);
    let first_position = *task.batch.positions[task.block.first_token..][..task.block.num_tokens]
        .iter()
        .min()
        .unwrap_or(&0) as usize;
    let lowest = task
        .geometry
        .window
        .map_or(0, |window| (first_position + 1).saturating_sub(window));
    let mut start = lowest / CHUNK * CHUNK;
    while start < task.block.kv_len {
        let count = CHUNK.min(task.block.kv_len - start);
        pack_keys::<S, E>(&task, &scratch, start, count);
        score::<S>(&scratch, task.geometry.head_dim, count);
        weigh::<S, E>(&task, &scratch, start, count);
        pack_values::<S, E>(&task, &scratch, start, count);
        add_values::<S>(&scratch, count);
        start += CHUNK;
    }
    store_output::<S, E>(&task, &scratch);
}

/// Row `token * group + head` of the scratch is that head's query, scaled.
#[inline(always)]
unsafe fn load_queries<S: Simd, E: Element>(task: &BlockTask<'_, E>, scratch: &Scratch) {
    let (group, head_dim) = (task.geometry.group(), task.geometry.head_dim);
    let scale = S::splat(task.geometry.scale);
    for row in 0..scratch.rows {
        let source = task
            .tensors
            .q
            .row::<E>(task.block.first_token + row / group);
        let source = source.add((task.kv_head * group + row % group) * head_dim);
        for column in (0..head_dim).step_by(LANES) {
            let value = load_partial::<S, E>(source.add(column), (head_dim - column).min(LANES));
            S::store(
                scratch.query.add(row * scratch.width + column),
                S::mul(value, scale),
            );
            S::store(
                scratch.output.add(row * scratch.width + column),
                S::splat(0.0),
            );
        }
        *scratch.highest.add(row) = f32::NEG_INFINITY;
        *scratch.total.add(row) = 0.0;
    }
}

/// Address of the key of `task`'s head at `position` of its row.
#[inline(always)]
unsafe fn key_at<E>(task: &BlockTask<'_, E>, position: usize) -> *const u8 {
    let pair = CachePair::new(task.geometry, task.cache);
    let column = position / task.geometry.page_size;
    debug_assert!(column < task.batch.page_table_stride);
    let page = *task
        .batch
        .page_table
        .add(task.block.slot * task.batch.page_table_stride + column);
    debug_assert!(page >= 0);
    pair.key(page as usize, position % task.geometry.page_size)
        .add(task.kv_head * task.geometry.head_dim * size_of::<E>())
}

/// Transposes keys start..start + count into panels; lanes beyond count keep old values, which nothing reads.
#[inline(always)]
unsafe fn pack_keys<S: Simd, E: Element>(
    task: &BlockTask<'_, E>,
    scratch: &Scratch,
    start: usize,
    count: usize,
) {
    let (head_dim, width) = (task.geometry.head_dim, scratch.width);
    for eight in (0..count).step_by(8) {
        for lane in 0..(count - eight).min(8) {
            let source = key_at(task, start + eight + lane).cast::<E>();
            for column in (0..head_dim).step_by(LANES) {
                let value =
                    load_partial::<S, E>(source.add(column), (head_dim - column).min(LANES));
                S::store(scratch.eight.add(lane * width + column), value);
            }
        }
        let panel = scratch
            .panels
            .add((eight / LANES) * width * LANES + eight % LANES);
        for column in (0..head_dim).step_by(8) {
            S::transpose8(
                scratch.eight.add(column),
                width,
                panel.add(column * LANES),
                LANES,
            );
        }
    }
}

/// Scores of all rows against the packed keys.
#[inline(always)]
unsafe fn score<S: Simd>(scratch: &Scratch, head_dim: usize, count: usize) {
    let panels = Panels {
        ptr: scratch.panels.cast_const(),
        stride: scratch.width * LANES,
    };
    for tile in 0..scratch.rows.div_ceil(MAX_ROWS) {
        let from = tile_start(scratch.rows, tile);
        let to = tile_start(scratch.rows, tile + 1);
        let rows = Rows {
            ptr: scratch.query.add(from * scratch.width),
            stride: scratch.width,
        };
        let target = scratch.scores.add(from * CHUNK);
        with_rows!(
            to - from,
            MR,
            product::<S, MR>(
                rows,
                panels,
                head_dim,
                target,
                CHUNK,
                count.div_ceil(LANES),
                false
            )
        );
    }
}

/// target[r][16 p ..] (+)= rows x panels.
#[inline(always)]
unsafe fn product<S: Simd, const MR: usize>(
    rows: Rows,
    panels: Panels<f32>,
    depth: usize,
    target: *mut f32,
    target_stride: usize,
    num_panels: usize,
    add: bool,
) {
    let mut panel = 0;
    if MR <= 3 {
        while panel + 2 <= num_panels {
            product_of::<S, MR, 2>(
                rows,
                panels.skip(panel),
                depth,
                target.add(panel * LANES),
                target_stride,
                add,
            );
            panel += 2;
        }
    }
    while panel < num_panels {
        product_of::<S, MR, 1>(
            rows,
            panels.skip(panel),
            depth,
            target.add(panel * LANES),
            target_stride,
            add,
        );
        panel += 1;
    }
}

#[inline(always)]
unsafe fn product_of<S: Simd, const MR: usize, const NP: usize>(
    rows: Rows,
    panels: Panels<f32>,
    depth: usize,
    target: *mut f32,
    target_stride: usize,
    add: bool,
) {
    let mut acc = [[S::splat(0.0); NP]; MR];
    if add {
        for (r, lanes) in acc.iter_mut().enumerate() {
            for (p, value) in lanes.iter_mut().enumerate() {
                *value = S::load(target.add(r * target_stride + p * LANES));
            }
        }
    }
    accumulate::<S, f32, MR, NP, false>(rows, panels, depth, &mut acc);
    for (r, lanes) in acc.iter().enumerate() {
        for (p, value) in lanes.iter().enumerate() {
            S::store(target.add(r * target_stride + p * LANES), *value);
        }
    }
}

/// Turns scores into weights exp(score - highest), rescaling what was summed under a lower maximum.
#[inline(always)]
unsafe fn weigh<S: Simd, E: Element>(
    task: &BlockTask<'_, E>,
    scratch: &Scratch,
    start: usize,
    count: usize,
) {
    let group = task.geometry.group();
    let padded = count.next_multiple_of(LANES);
    for row in 0..scratch.rows {
        let position = task.batch.positions[task.block.first_token + row / group] as usize;
        let low = task
            .geometry
            .window
            .map_or(0, |window| (position + 1).saturating_sub(window));
        let low = low.saturating_sub(start).min(padded); // [low, high) of this chunk is visible
        let high = (position + 1).saturating_sub(start).min(count);
        let scores = scratch.scores.add(row * CHUNK);
        if low >= high {
            std::slice::from_raw_parts_mut(scores, padded).fill(0.0);
            continue;
        }
        std::slice::from_raw_parts_mut(scores, low).fill(f32::NEG_INFINITY);
        std::slice::from_raw_parts_mut(scores.add(high), padded - high).fill(f32::NEG_INFINITY);
        weigh_row::<S>(scratch, row, padded);
    }
}

#[inline(always)]
unsafe fn weigh_row<S: Simd>(scratch: &Scratch, row: usize, padded: usize) {
    let scores = scratch.scores.add(row * CHUNK);
    let mut best = S::splat(*scratch.highest.add(row));
    for column in (0..padded).step_by(LANES) {
        best = S::max(best, S::load(scores.add(column)));
    }
    let highest = S::max_lane(best);
    let mut sum = S::splat(0.0);
    for column in (0..padded).step_by(LANES) {
        let weight = exp::<S>(S::sub(S::load(scores.add(column)), S::splat(highest)));
        S::store(scores.add(column), weight);
        sum = S::add(sum, weight);
    }
    let before = *scratch.highest.add(row);
    if before < highest {
        let mut lanes = [0.0f32; LANES];
        S::store(lanes.as_mut_ptr(), exp::<S>(S::splat(before - highest)));
        let factor = lanes[0];
        *scratch.total.add(row) *= factor;
        let output = scratch.output.add(row * scratch.width);
        for column in (0..scratch.width).step_by(LANES) {
            S::store(
                output.add(column),
                S::mul(S::load(output.add(column)), S::splat(factor)),
            );
        }
        *scratch.highest.add(row) = highest;
    }
    *scratch.total.add(row) += S::sum(sum);
}

/// Widens values start..start + count into panels of 16 columns.
#[inline(always)]
unsafe fn pack_values<S: Simd, E: Element>(
    task: &BlockTask<'_, E>,
    scratch: &Scratch,
    start: usize,
    count: usize,
) {
    let head_dim = task.geometry.head_dim;
    let value_offset = CachePair::new(task.geometry, task.cache).value_offset;
    for i in 0..count {
        let source = key_at(task, start + i).add(value_offset).cast::<E>();
        for column in (0..head_dim).step_by(LANES) {
            let value = load_partial::<S, E>(source.add(column), (head_dim - column).min(LANES));
            S::store(
                scratch
                    .panels
                    .add((column / LANES) * CHUNK * LANES + i * LANES),
                value,
            );
        }
    }
}

/// Adds weight * value of the packed values to the rows' outputs, in order of position.
#[inline(always)]
unsafe fn add_values<S: Simd>(scratch: &Scratch, count: usize) {
    let panels = Panels {
        ptr: scratch.panels.cast_const(),
        stride: CHUNK * LANES,
    };
    for tile in 0..scratch.rows.div_ceil(MAX_ROWS) {
        let from = tile_start(scratch.rows, tile);
        let to = tile_start(scratch.rows, tile + 1);
        let rows = Rows {
            ptr: scratch.scores.add(from * CHUNK),
            stride: CHUNK,
        };
        let target = scratch.output.add(from * scratch.width);
        let num_panels = scratch.width / LANES;
        with_rows!(
            to - from,
            MR,
            product::<S, MR>(rows, panels, count, target, scratch.width, num_panels, true)
        );
    }
}

#[inline(always)]
unsafe fn store_output<S: Simd, E: Element>(task: &BlockTask<'_, E>, scratch: &Scratch) {
    let (group, head_dim) = (task.geometry.group(), task.geometry.head_dim);
    for row in 0..scratch.rows {
        let target = task
            .tensors
            .out
            .row::<E>(task.block.first_token + row / group);
        let target = target.add((task.kv_head * group + row % group) * head_dim);
        let inverse = S::splat(1.0 / *scratch.total.add(row));
        for column in (0..head_dim).step_by(LANES) {
            let value = S::mul(
                S::load(scratch.output.add(row * scratch.width + column)),
                inverse,
            );
            // adding +0 turns -0 into +0: chains that met masked zeros and chains that did not end equal
            let value = S::add(value, S::splat(0.0));
            store_partial::<S, E>(target.add(column), value, (head_dim - column).min(LANES));
        }
    }
}
