//! Newtype ids, so that a slot cannot be passed where a page belongs.

/// The caller's name of a request; unique among the live ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

/// The place of a running request in `0..max_num_seqs`; it stays the same until the request ends or is preempted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slot(pub u32);

/// A page of the KV cache, in `0..num_pages`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageId(pub u32);

/// A planned step; ids grow by one a plan and are never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StepId(pub u64);

/// Index of a live request in the scheduler's slab.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct RequestKey(pub(crate) u32);

impl RequestKey {
    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }
}
