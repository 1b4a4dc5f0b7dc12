//! Reading the paged cache: addresses of a chunk, and its keys and values as fp32 panels.
use super::scratch::{Scratch, width_of};
use super::{BlockTask, CHUNK, CachePair};
use crate::dtype::{Element, load_partial};
use crate::simd::{LANES, Simd};

const CACHE_LINE: usize = 64;

/// Where the keys of one head at positions start..start + count lie; each value is `value_offset` bytes further.
pub(super) struct Chunk {
    pub start: usize,
    pub count: usize,
    keys: [*const u8; CHUNK],
    value_offset: usize,
}

impl Chunk {
    /// The chunk from position `start`, cut at the block's end; may be empty.
    #[inline(always)]
    pub unsafe fn locate<E>(task: &BlockTask<'_, E>, start: usize) -> Chunk {
        let pair = CachePair::new(task.geometry, task.tensors.cache);
        let page_size = task.geometry.page_size;
        let count = CHUNK.min(task.block.kv_len.saturating_sub(start));
        let head_offset = task.kv_head * task.geometry.head_dim * size_of::<E>();
        let table = task
            .batch
            .page_table
            .add(task.block.slot * task.batch.page_table_stride);
        let mut keys = [std::ptr::null(); CHUNK];
        let (mut column, mut offset) = (start / page_size, start % page_size);
        let mut filled = 0;
        while filled < count {
            debug_assert!(column < task.batch.page_table_stride);
            let page = *table.add(column);
            debug_assert!(page >= 0);
            let first = pair.key(page as usize, offset).add(head_offset);
            let run = (page_size - offset).min(count - filled);
            for (i, key) in keys[filled..filled + run].iter_mut().enumerate() {
                *key = first.add(i * pair.token_bytes).cast_const();
            }
            filled += run;
            column += 1;
            offset = 0;
        }
        Chunk {
            start,
            count,
            keys,
            value_offset: pair.value_offset,
        }
    }

    /// Asks for the cache lines of the key at `index`, when there is one.
    #[inline(always)]
    pub unsafe fn fetch_key<S: Simd>(&self, index: usize, bytes: usize) {
        if index < self.count {
            fetch::<S>(self.keys[index], bytes);
        }
    }
}

#[inline(always)]
unsafe fn fetch<S: Simd>(ptr: *const u8, bytes: usize) {
    for line in (0..bytes).step_by(CACHE_LINE) {
        S::prefetch(ptr.wrapping_add(line));
    }
}

/// Transposes the keys into panels, asking for the values meanwhile. Lanes beyond the count keep old values, which
/// nothing reads.
#[inline(always)]
pub(super) unsafe fn pack_keys<S: Simd, E: Element>(
    chunk: &Chunk,
    scratch: &Scratch,
    head_dim: usize,
) {
    let width = width_of(head_dim);
    for eight in (0..chunk.count).step_by(8) {
        for lane in 0..(chunk.count - eight).min(8) {
            let source = chunk.keys[eight + lane].cast::<E>();
            fetch::<S>(
                source.cast::<u8>().add(chunk.value_offset),
                head_dim * size_of::<E>(),
            );
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

/// Widens the values into panels of 16 columns, asking for the next chunk's keys meanwhile.
#[inline(always)]
pub(super) unsafe fn pack_values<S: Simd, E: Element>(
    chunk: &Chunk,
    next: &Chunk,
    scratch: &Scratch,
    head_dim: usize,
) {
    for i in 0..chunk.count {
        next.fetch_key::<S>(i, head_dim * size_of::<E>());
        let source = chunk.keys[i].add(chunk.value_offset).cast::<E>();
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
