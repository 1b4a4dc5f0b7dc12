//! Two packed slots in one shared-memory map. One is read (copied to the device, or by other ranks) while the next step
//! is planned into the other.

use crate::error::RuntimeError;
use memmap2::{MmapOptions, MmapRaw};
use std::sync::Arc;

/// Slots of a map.
pub const NUM_SLOTS: usize = 2;
const WORD_BYTES: usize = size_of::<i32>();
/// Slots start at multiples of this many words (a page of memory).
const SLOT_ALIGN_WORDS: usize = 4096 / WORD_BYTES;

/// The mapped memory of both slots. It stays at the same address until dropped; untouched parts cost no memory.
#[derive(Debug)]
pub struct SlotMap {
    map: MmapRaw,
    num_words: usize,
}

impl SlotMap {
    /// Two zeroed slots of `num_words` i32 words each.
    pub(crate) fn new(num_words: usize) -> Result<Self, RuntimeError> {
        let bytes = NUM_SLOTS * num_words.next_multiple_of(SLOT_ALIGN_WORDS) * WORD_BYTES;
        let map = map_shared(bytes).map_err(|source| RuntimeError::Map { bytes, source })?;
        Ok(Self { map, num_words })
    }

    /// Words of a slot.
    pub fn num_words(&self) -> usize {
        self.num_words
    }

    /// First word of a slot, for views by readers that know when the slot is not being written.
    ///
    /// # Errors
    /// `index` is neither 0 nor 1.
    pub fn as_ptr(&self, index: usize) -> Result<*mut i32, RuntimeError> {
        if index >= NUM_SLOTS {
            return Err(RuntimeError::SlotIndex { index });
        }
        let offset = index * self.num_words.next_multiple_of(SLOT_ALIGN_WORDS);
        // SAFETY: the map holds NUM_SLOTS aligned slots, and index is below NUM_SLOTS.
        Ok(unsafe { self.map.as_mut_ptr().cast::<i32>().add(offset) })
    }
}

#[cfg(target_os = "linux")]
fn map_shared(bytes: usize) -> std::io::Result<MmapRaw> {
    // An anonymous file, so that the map is shared and its descriptor can be handed to other ranks.
    let file = rustix::fs::memfd_create("sonar-slots", rustix::fs::MemfdFlags::CLOEXEC)?;
    let file = std::fs::File::from(file);
    file.set_len(bytes as u64)?;
    MmapOptions::new().len(bytes).map_raw(&file)
}

#[cfg(not(target_os = "linux"))]
fn map_shared(bytes: usize) -> std::io::Result<MmapRaw> {
    Ok(MmapOptions::new().len(bytes).map_anon()?.into())
}

/// The one writer of a map.
#[derive(Debug)]
pub(crate) struct SlotWriter(Arc<SlotMap>);

impl SlotWriter {
    /// The map and its writer; there is no other way to make one.
    pub(crate) fn new(num_words: usize) -> Result<(Arc<SlotMap>, Self), RuntimeError> {
        let map = Arc::new(SlotMap::new(num_words)?);
        Ok((Arc::clone(&map), Self(map)))
    }

    /// The words of a slot, to be written. Readers leave a slot alone from the plan into it until the plan returns.
    pub(crate) fn words(&mut self, index: usize) -> Result<&mut [i32], RuntimeError> {
        let first = self.0.as_ptr(index)?;
        // SAFETY: the slot has num_words words, is aligned to 4096 bytes, and lives as long as self; `&mut self` of
        // the only writer makes this the only mutable borrow.
        Ok(unsafe { std::slice::from_raw_parts_mut(first, self.0.num_words()) })
    }
}
