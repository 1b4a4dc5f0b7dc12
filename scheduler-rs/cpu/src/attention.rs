//! Causal attention over a paged cache: decode, verification and chunked prefill are one kernel.
//!
//! For each query row the keys are visited in order of position, in chunks of [`CHUNK`] aligned to position 0, with a
//! running maximum and sum in fp32. Chunks are the only grouping, so a row's result does not depend on what else is
//! in the batch, on how a prompt was split into steps, or on the thread count.
use std::sync::Mutex;

use crate::buffer::AlignedBuffer;
use crate::dtype::{Dtype, Element};
use crate::matrix::{Matrix, MatrixMut};
use crate::simd::{Kernel, Level};
use crate::threads::Threads;
use crate::with_element;

mod chunk;
mod pages;
mod plan;
mod scratch;

pub use plan::{Batch, Plan};

/// Positions handled between two updates of the running maximum.
pub const CHUNK: usize = 64;
/// Most query rows (tokens times query heads of a group) that share one pass over the keys.
const MAX_QUERY_ROWS: usize = 24;

/// Shape of the attention of one model.
#[derive(Clone, Copy, Debug)]
pub struct Geometry {
    /// Query heads; a multiple of `num_kv_heads`.
    pub num_q_heads: usize,
    /// Key and value heads.
    pub num_kv_heads: usize,
    /// Elements of a head; a multiple of 8.
    pub head_dim: usize,
    /// Tokens of a page.
    pub page_size: usize,
    /// Keys a token sees, itself included; `None`: all of them.
    pub window: Option<usize>,
    /// Factor on the products of queries and keys.
    pub scale: f32,
}

impl Geometry {
    /// Query heads that share a key head.
    pub fn group(&self) -> usize {
        self.num_q_heads / self.num_kv_heads
    }

    /// Tokens of one row that share a pass over the keys.
    pub fn tokens_per_block(&self) -> usize {
        (MAX_QUERY_ROWS / self.group()).max(1)
    }
}

/// One layer's cache `[num_pages, 2, page_size, num_kv_heads, head_dim]`, keys before values.
#[derive(Clone, Copy, Debug)]
pub struct LayerCache {
    /// First element.
    pub ptr: *mut u8,
    /// Storage type.
    pub dtype: Dtype,
}

// SAFETY: tasks write disjoint slots, and read none that another writes at the time.
unsafe impl Send for LayerCache {}
// SAFETY: as above.
unsafe impl Sync for LayerCache {}

/// Working memory, one a thread of the team.
#[derive(Debug)]
pub struct Workspace {
    per_thread: Vec<Mutex<AlignedBuffer>>,
}

impl Workspace {
    /// Memory for a team of `threads`.
    pub fn new(threads: usize) -> Workspace {
        Workspace {
            per_thread: (0..threads.max(1))
                .map(|_| Mutex::new(AlignedBuffer::zeroed(1 << 16)))
                .collect(),
        }
    }
}

/// Tensors of one call. Rows are tokens; `q` and `out` hold query heads side by side, `k` and `v` key heads.
#[derive(Clone, Copy, Debug)]
pub struct Tensors {
    /// Queries `[T, num_q_heads * head_dim]`.
    pub q: Matrix,
    /// Keys `[T, num_kv_heads * head_dim]`, of the cache's storage type.
    pub k: Matrix,
    /// Values, as keys.
    pub v: Matrix,
    /// Output, as queries.
    pub out: MatrixMut,
    /// The layer's cache.
    pub cache: LayerCache,
}

/// Writes k and v at `batch.slot_mapping`, then attends.
///
/// # Safety
/// All memory is valid for the geometry; page table entries up to each token's position are pages of the cache; `q`,
/// `k`, `v`, `out` and the cache have one storage type; the CPU has `level`.
pub unsafe fn attend(
    level: Level,
    threads: &Threads,
    workspace: &Workspace,
    geometry: &Geometry,
    plan: &Plan,
    batch: &Batch<'_>,
    tensors: &Tensors,
) {
    let cache = tensors.cache;
    write_cache(threads, geometry, batch, tensors);
    let heads = geometry.num_kv_heads;
    with_element!(cache.dtype, E, {
        threads.run(plan.blocks().len() * heads, &|worker, task| {
            let Ok(mut buffer) = workspace.per_thread[worker].lock() else {
                panic!("the attention workspace was poisoned by an earlier panic");
            };
            let block = plan.blocks()[task / heads];
            level.run(BlockTask::<E> {
                geometry,
                batch,
                block,
                kv_head: task % heads,
                tensors,
                scratch: scratch::Scratch::new(
                    &mut buffer,
                    block.num_tokens * geometry.group(),
                    geometry.head_dim,
                ),
                marker: std::marker::PhantomData,
            });
        });
    });
}

/// Copies the new keys and values into their slots.
unsafe fn write_cache(
    threads: &Threads,
    geometry: &Geometry,
    batch: &Batch<'_>,
    tensors: &Tensors,
) {
    let cache = tensors.cache;
    let tokens = batch.slot_mapping.len();
    let bytes = geometry.num_kv_heads * geometry.head_dim * cache.dtype.size();
    let blocks = if tokens * bytes < (64 << 10) {
        1
    } else {
        threads.count()
    };
    let pair = CachePair::new(geometry, cache);
    threads.run(blocks, &|_, block| {
        for token in tokens * block / blocks..tokens * (block + 1) / blocks {
            let slot = batch.slot_mapping[token] as usize;
            let (page, offset) = (slot / geometry.page_size, slot % geometry.page_size);
            let key = pair.key(page, offset);
            let size = cache.dtype.size();
            std::ptr::copy_nonoverlapping(
                tensors.k.ptr.add(token * tensors.k.stride * size),
                key,
                bytes,
            );
            std::ptr::copy_nonoverlapping(
                tensors.v.ptr.add(token * tensors.v.stride * size),
                key.add(pair.value_offset),
                bytes,
            );
        }
    });
}

/// Byte addresses within a layer's cache.
#[derive(Clone, Copy)]
struct CachePair {
    base: *mut u8,
    page_bytes: usize,
    token_bytes: usize,
    value_offset: usize,
}

// SAFETY: plain addresses, as `LayerCache`.
unsafe impl Send for CachePair {}
// SAFETY: as above.
unsafe impl Sync for CachePair {}

impl CachePair {
    fn new(geometry: &Geometry, cache: LayerCache) -> CachePair {
        let token_bytes = geometry.num_kv_heads * geometry.head_dim * cache.dtype.size();
        let value_offset = geometry.page_size * token_bytes;
        CachePair {
            base: cache.ptr,
            page_bytes: 2 * value_offset,
            token_bytes,
            value_offset,
        }
    }

    /// First byte of the keys of all heads at a page's token.
    #[inline(always)]
    unsafe fn key(&self, page: usize, offset: usize) -> *mut u8 {
        self.base
            .add(page * self.page_bytes + offset * self.token_bytes)
    }
}

struct BlockTask<'a, E> {
    geometry: &'a Geometry,
    batch: &'a Batch<'a>,
    block: plan::Block,
    kv_head: usize,
    tensors: &'a Tensors,
    scratch: scratch::Scratch,
    marker: std::marker::PhantomData<E>,
}

impl<E: Element> Kernel for BlockTask<'_, E> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: crate::simd::Simd>(self) {
        chunk::attend_block::<S, E>(self);
    }
}
