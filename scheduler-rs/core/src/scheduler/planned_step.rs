//! A step as a value: its rows, new page-table entries and admissions.

use crate::ids::{PageId, RequestId, RequestKey, Slot, StepId};
use crate::packed_batch::Counts;

/// One request's part of a step: its tokens from `num_computed_tokens` on, drafts last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Row {
    pub(crate) key: RequestKey,
    pub(crate) slot: Slot,
    pub(crate) num_tokens: u32,
    pub(crate) num_drafts: u32,
    /// Whether the row reaches the end of its known tokens.
    pub(crate) samples: bool,
    /// Drafts that the request's pages hold without growing.
    pub(crate) most_drafts_in_pages: u32,
}

impl Row {
    pub(crate) fn num_samples(&self) -> u32 {
        if self.samples { self.num_drafts + 1 } else { 0 }
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

    pub(super) fn clear(&mut self) {
        self.rows.clear();
        self.new_pages.clear();
        self.admitted.clear();
    }
}
