//! Working memory of one block.
use super::{CHUNK, MAX_QUERY_ROWS};
use crate::buffer::AlignedBuffer;
use crate::simd::LANES;

/// Elements from one scratch row to the next: whole lanes.
#[inline(always)]
pub(super) fn width_of(head_dim: usize) -> usize {
    head_dim.next_multiple_of(LANES)
}

/// fp32 arrays within a thread's buffer. `width` below is [`width_of`] the head.
pub(super) struct Scratch {
    /// Query rows of the block: tokens times query heads of the group, heads innermost.
    pub rows: usize,
    /// `[rows, width]`, scaled.
    pub query: *mut f32,
    /// `[rows, width]`: sum of weight * value so far.
    pub output: *mut f32,
    /// `[rows, CHUNK]`: scores, then weights.
    pub scores: *mut f32,
    /// Keys `[CHUNK / 16][width][16]`, then values `[width / 16][CHUNK][16]`.
    pub panels: *mut f32,
    /// `[8, width]`: keys about to be transposed.
    pub eight: *mut f32,
    /// `[rows]`: greatest score so far.
    pub highest: *mut f32,
    /// `[rows]`: sum of weights so far.
    pub total: *mut f32,
}

impl Scratch {
    pub fn new(buffer: &mut AlignedBuffer, rows: usize, head_dim: usize) -> Scratch {
        let width = width_of(head_dim);
        let space = rows.max(MAX_QUERY_ROWS);
        let sizes = [
            space * width,
            space * width,
            space * CHUNK,
            CHUNK * width,
            8 * width,
            space,
            space,
        ];
        buffer.reserve(sizes.iter().sum::<usize>() * size_of::<f32>());
        let mut next: *mut f32 = buffer.as_mut_ptr();
        let [query, output, scores, panels, eight, highest, total] = sizes.map(|size| {
            let part = next;
            next = next.wrapping_add(size);
            part
        });
        Scratch {
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
