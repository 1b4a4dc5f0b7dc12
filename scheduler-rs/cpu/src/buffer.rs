//! Zeroed memory aligned to cache lines, on huge pages where the system grants them.
use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};

const ALIGN: usize = 64;
const HUGE_PAGE: usize = 2 << 20;

/// A zero-initialised, 64-byte aligned byte array of fixed length.
#[derive(Debug)]
pub struct AlignedBuffer {
    ptr: *mut u8,
    layout: Layout,
}

// SAFETY: the buffer owns its memory; shared access hands out raw pointers whose use is the caller's contract.
unsafe impl Send for AlignedBuffer {}
// SAFETY: as above.
unsafe impl Sync for AlignedBuffer {}

impl AlignedBuffer {
    /// `len` zero bytes (at least one cache line is reserved).
    pub fn zeroed(len: usize) -> Self {
        let align = if len >= HUGE_PAGE { HUGE_PAGE } else { ALIGN };
        let Ok(layout) = Layout::from_size_align(len.max(ALIGN), align) else {
            panic!("a buffer of {len} bytes is beyond the address space");
        };
        // SAFETY: the layout has a non-zero size.
        let ptr = unsafe { alloc_zeroed(layout) };
        if ptr.is_null() {
            handle_alloc_error(layout);
        }
        if len >= HUGE_PAGE {
            // SAFETY: the range is ours; the advice changes no contents and its failure is harmless.
            unsafe { libc::madvise(ptr.cast(), len, libc::MADV_HUGEPAGE) };
        }
        AlignedBuffer { ptr, layout }
    }

    /// Bytes held.
    pub fn len(&self) -> usize {
        self.layout.size()
    }

    /// Never true: a cache line is always held.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Start of the memory.
    pub fn as_ptr<T>(&self) -> *const T {
        self.ptr.cast()
    }

    /// Start of the memory, writable.
    pub fn as_mut_ptr<T>(&mut self) -> *mut T {
        self.ptr.cast()
    }

    /// Grows to at least `len` bytes, losing the contents when it must move.
    pub fn reserve(&mut self, len: usize) {
        if len > self.len() {
            *self = AlignedBuffer::zeroed(len.next_power_of_two());
        }
    }
}

impl Drop for AlignedBuffer {
    fn drop(&mut self) {
        // SAFETY: allocated in `zeroed` with this layout.
        unsafe { dealloc(self.ptr, self.layout) };
    }
}
