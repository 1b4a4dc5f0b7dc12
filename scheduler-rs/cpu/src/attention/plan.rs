//! Which tokens share a pass over the keys, and in which order the work is handed out.
use super::Geometry;

/// The packed batch, as attention reads it. R rows, T tokens.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a> {
    /// Token ranges of the rows, half-open, `[R + 1]`.
    pub qo_indptr: &'a [i32],
    /// Page-table row of each row, `[R]`.
    pub slots: &'a [i32],
    /// Position of each token, `[T]`; it sees the keys at 0..=position.
    pub positions: &'a [i32],
    /// Where each token's key and value go: page * page_size + offset, `[T]`.
    pub slot_mapping: &'a [i32],
    /// Page ids by slot, `[max_num_seqs, page_table_stride]`.
    pub page_table: *const i32,
    /// Columns of the page table.
    pub page_table_stride: usize,
}

// SAFETY: read-only during a step.
unsafe impl Send for Batch<'_> {}
// SAFETY: as above.
unsafe impl Sync for Batch<'_> {}

/// Adjacent tokens of one row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Block {
    pub first_token: usize,
    pub num_tokens: usize,
    pub slot: usize,
    /// One past the greatest position of its tokens.
    pub kv_len: usize,
}

/// The blocks of one batch, costly ones first; the same for every layer.
#[derive(Debug, Default)]
pub struct Plan {
    blocks: Vec<Block>,
}

impl Plan {
    /// Replaces the plan by that of `batch`, keeping its memory.
    pub fn rebuild(&mut self, geometry: &Geometry, batch: &Batch<'_>) {
        self.blocks.clear();
        let most = geometry.tokens_per_block();
        for (row, slot) in batch.slots.iter().enumerate() {
            let (mut first, end) = (
                batch.qo_indptr[row] as usize,
                batch.qo_indptr[row + 1] as usize,
            );
            while first < end {
                let num_tokens = most.min(end - first);
                let last = batch.positions[first..first + num_tokens]
                    .iter()
                    .max()
                    .map_or(0, |position| *position);
                self.blocks.push(Block {
                    first_token: first,
                    num_tokens,
                    slot: *slot as usize,
                    kv_len: last as usize + 1,
                });
                first += num_tokens;
            }
        }
        self.blocks
            .sort_by_key(|block| std::cmp::Reverse(block.kv_len * (3 + block.num_tokens)));
    }

    /// Query-key pairs of the plan, for one query head.
    pub fn work(&self) -> usize {
        self.blocks
            .iter()
            .map(|block| block.kv_len * block.num_tokens)
            .sum()
    }

    pub(super) fn blocks(&self) -> &[Block] {
        &self.blocks
    }
}
