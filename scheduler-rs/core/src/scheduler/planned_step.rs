//! A step as a value: its rows, new page-table entries and admissions.

use crate::ids::{PageId, RequestId, RequestKey, Slot, StepId};
use crate::packed_batch::Counts;
use crate::request::Request;

/// One request's part of a step: its tokens from `num_computed_tokens` on, drafts last. What the step is packed from is
/// copied here, so that packing reads nothing else.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Row {
    pub(crate) key: RequestKey,
    pub(crate) slot: Slot,
    pub(crate) id: RequestId,
    pub(crate) num_tokens: u32,
    pub(crate) num_drafts: u32,
    /// Whether the row reaches the end of its known tokens.
    pub(crate) samples: bool,
    pub(crate) num_preemptions: u16,
    /// Drafts that the request's pages hold without growing.
    pub(crate) most_drafts_in_pages: u32,
    pub(crate) num_computed_tokens: u32,
    pub(crate) num_full_pages: u32,
    pub(crate) open_places: [u32; 2],
    pub(crate) output_pos: u32,
    pub(crate) last_token: i32,
    pub(crate) num_cached_tokens: u32,
}

/// One cache line.
const _: () = assert!(size_of::<Row>() <= 64);

impl Row {
    /// Makes it the row of the next `num_tokens` tokens of a running request, without drafts.
    #[inline]
    pub(crate) fn set(&mut self, key: RequestKey, slot: Slot, request: &Request, num_tokens: u32) {
        self.key = key;
        self.slot = slot;
        self.id = request.id;
        self.num_tokens = num_tokens;
        self.num_drafts = 0;
        self.samples = num_tokens == request.num_uncomputed_tokens();
        self.num_preemptions = request.num_preemptions;
        self.most_drafts_in_pages = 0;
        self.num_computed_tokens = request.num_computed_tokens;
        self.num_full_pages = request.num_full_pages;
        self.open_places = request.open_places;
        self.output_pos = request.len() - request.num_prompt_tokens;
        self.last_token = request.last_token;
        self.num_cached_tokens = request.num_cached_tokens;
    }

    pub(crate) fn num_samples(&self) -> u32 {
        if self.samples { self.num_drafts + 1 } else { 0 }
    }

    /// Positions up to the row's last token.
    pub(crate) fn kv_len(&self) -> u32 {
        self.num_computed_tokens + self.num_tokens
    }

    /// Pages that hold them, and the positions in the last one.
    #[inline]
    pub(crate) fn pages(&self, page_size: u32) -> (u32, u32) {
        let num_loose = self.kv_len() - self.num_full_pages * page_size;
        // A decode row's lie in one page or two.
        let num_pages = if num_loose <= 2 * page_size {
            1 + u32::from(num_loose > page_size)
        } else {
            num_loose.div_ceil(page_size)
        };
        (
            self.num_full_pages + num_pages,
            num_loose - (num_pages - 1) * page_size,
        )
    }
}

/// A page-table entry that the device does not have yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NewPage {
    pub(crate) slot: Slot,
    pub(crate) index: u32,
    pub(crate) page: PageId,
}

/// A request that enters a slot with this step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Admitted {
    pub(crate) key: RequestKey,
    pub(crate) slot: Slot,
    pub(crate) id: RequestId,
    /// (tokens looked up, tokens found), when this is the request's first admission.
    pub(crate) first_lookup: Option<(u32, u32)>,
}

/// A step that has been planned and is to be committed or reverted, once: both take it by value.
#[must_use = "a planned step holds pages; commit or revert it"]
#[derive(Debug, Default)]
pub struct PlannedStep {
    pub(super) id: u64,
    pub(crate) rows: Vec<Row>,
    pub(crate) new_pages: Vec<NewPage>,
    pub(crate) admitted: Vec<Admitted>,
    pub(crate) num_decode_reqs: usize,
    pub(crate) num_tokens: u32,
    pub(crate) num_decode_tokens: u32,
    pub(crate) num_draft_tokens: u32,
    pub(crate) num_sample_rows: u32,
    pub(crate) num_sampling_reqs: u32,
}

impl PlannedStep {
    /// The step's id.
    pub fn id(&self) -> StepId {
        StepId(self.id)
    }

    /// Rows of the batch.
    pub fn num_reqs(&self) -> usize {
        self.rows.len()
    }

    /// Draft tokens of each row, and whether it samples, in row order.
    pub fn rows(&self) -> impl ExactSizeIterator<Item = (Slot, u32, bool)> + '_ {
        self.rows
            .iter()
            .map(|row| (row.slot, row.num_drafts, row.samples))
    }

    pub(crate) fn counts(&self) -> Counts {
        Counts {
            num_reqs: self.rows.len() as u64,
            num_tokens: u64::from(self.num_tokens),
            num_sample_rows: u64::from(self.num_sample_rows),
            num_new_pages: self.new_pages.len() as u64,
            num_admitted: self.admitted.len() as u64,
        }
    }

    /// Prepares for another step. Its rows are written over.
    pub(super) fn clear(&mut self) {
        self.new_pages.clear();
        self.admitted.clear();
    }
}
