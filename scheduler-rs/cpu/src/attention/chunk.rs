//! One block of query rows against one key head.
use super::pages::{Chunk, pack_keys, pack_values};
use super::scratch::{Scratch, width_of};
use super::{BlockTask, CHUNK};
use crate::dtype::{Element, load_partial, store_partial};
use crate::math::exp;
use crate::simd::{LANES, Simd};
use crate::tile::{MAX_ROWS, Panels, Rows, accumulate, tile_start, with_rows};

#[inline(always)]
pub(super) unsafe fn attend_block<S: Simd, E: Element>(task: BlockTask<'_, E>) {
    match task.geometry.head_dim {
        64 => visit_keys::<S, E>(&task, &task.scratch, 64),
        128 => visit_keys::<S, E>(&task, &task.scratch, 128),
        other => visit_keys::<S, E>(&task, &task.scratch, other),
    }
}

/// The body of a block; `head_dim` is a constant for the usual sizes.
#[inline(always)]
unsafe fn visit_keys<S: Simd, E: Element>(
    task: &BlockTask<'_, E>,
    scratch: &Scratch,
    head_dim: usize,
) {
    let positions = &task.batch.positions[task.block.first_token..][..task.block.num_tokens];
    let earliest = positions
        .iter()
        .min()
        .map_or(0, |position| *position as usize);
    let lowest = task
        .geometry
        .window
        .map_or(0, |window| (earliest + 1).saturating_sub(window));
    let mut chunk = Chunk::locate(task, lowest / CHUNK * CHUNK);
    for i in 0..chunk.count {
        chunk.fetch_key::<S>(i, head_dim * size_of::<E>());
    }
    load_queries::<S, E>(task, scratch, head_dim);
    while chunk.count > 0 {
        let next = Chunk::locate(task, chunk.start + CHUNK);
        pack_keys::<S, E>(&chunk, scratch, head_dim);
        score::<S>(scratch, head_dim, chunk.count);
        weigh::<S, E>(task, scratch, head_dim, &chunk);
        pack_values::<S, E>(&chunk, &next, scratch, head_dim);
        add_values::<S>(scratch, head_dim, chunk.count);
        chunk = next;
    }
    store_output::<S, E>(task, scratch, head_dim);
}

/// Row `token * group + head` of the scratch is that head's query, scaled.
#[inline(always)]
unsafe fn load_queries<S: Simd, E: Element>(
    task: &BlockTask<'_, E>,
    scratch: &Scratch,
    head_dim: usize,
) {
    let (group, width) = (task.geometry.group(), width_of(head_dim));
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
                scratch.query.add(row * width + column),
                S::mul(value, scale),
            );
            S::store(scratch.output.add(row * width + column), S::splat(0.0));
        }
        *scratch.highest.add(row) = f32::NEG_INFINITY;
        *scratch.total.add(row) = 0.0;
    }
}

/// Scores of all rows against the packed keys.
#[inline(always)]
unsafe fn score<S: Simd>(scratch: &Scratch, head_dim: usize, count: usize) {
    let width = width_of(head_dim);
    let panels = Panels {
        ptr: scratch.panels.cast_const(),
        stride: width * LANES,
    };
    for tile in 0..scratch.rows.div_ceil(MAX_ROWS) {
        let from = tile_start(scratch.rows, tile);
        let to = tile_start(scratch.rows, tile + 1);
        let rows = Rows {
            ptr: scratch.query.add(from * width),
            stride: width,
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
    if MR <= 2 {
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
    head_dim: usize,
    chunk: &Chunk,
) {
    let (start, count) = (chunk.start, chunk.count);
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
        weigh_row::<S>(scratch, row, padded, width_of(head_dim));
    }
}

#[inline(always)]
unsafe fn weigh_row<S: Simd>(scratch: &Scratch, row: usize, padded: usize, width: usize) {
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
        let output = scratch.output.add(row * width);
        for column in (0..width).step_by(LANES) {
            S::store(
                output.add(column),
                S::mul(S::load(output.add(column)), S::splat(factor)),
            );
        }
        *scratch.highest.add(row) = highest;
    }
    *scratch.total.add(row) += S::sum(sum);
}

/// Adds weight * value of the packed values to the rows' outputs, in order of position.
#[inline(always)]
unsafe fn add_values<S: Simd>(scratch: &Scratch, head_dim: usize, count: usize) {
    let width = width_of(head_dim);
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
        let target = scratch.output.add(from * width);
        let num_panels = width / LANES;
        with_rows!(
            to - from,
            MR,
            product::<S, MR>(rows, panels, count, target, width, num_panels, true)
        );
    }
}

#[inline(always)]
unsafe fn store_output<S: Simd, E: Element>(
    task: &BlockTask<'_, E>,
    scratch: &Scratch,
    head_dim: usize,
) {
    let (group, width) = (task.geometry.group(), width_of(head_dim));
    for row in 0..scratch.rows {
        let target = task
            .tensors
            .out
            .row::<E>(task.block.first_token + row / group);
        let target = target.add((task.kv_head * group + row % group) * head_dim);
        let inverse = S::splat(1.0 / *scratch.total.add(row));
        for column in (0..head_dim).step_by(LANES) {
            let value = S::mul(S::load(scratch.output.add(row * width + column)), inverse);
            // adding +0 turns -0 into +0: chains that met masked zeros and chains that did not end equal
            let value = S::add(value, S::splat(0.0));
            store_partial::<S, E>(target.add(column), value, (head_dim - column).min(LANES));
        }
    }
}
