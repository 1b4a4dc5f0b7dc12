//! Borrowed matrices over foreign memory.
use crate::dtype::Dtype;

/// A row-major matrix read by a kernel. Rows are `stride` elements apart; a row's elements are adjacent.
#[derive(Clone, Copy, Debug)]
pub struct Matrix {
    /// First element.
    pub ptr: *const u8,
    /// Elements between the starts of two rows.
    pub stride: usize,
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    /// Storage type.
    pub dtype: Dtype,
}

/// A row-major matrix written by a kernel; see [`Matrix`].
#[derive(Clone, Copy, Debug)]
pub struct MatrixMut {
    /// First element.
    pub ptr: *mut u8,
    /// Elements between the starts of two rows.
    pub stride: usize,
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    /// Storage type.
    pub dtype: Dtype,
}

// SAFETY: plain addresses; kernels write disjoint rows or columns from different threads.
unsafe impl Send for Matrix {}
// SAFETY: as above.
unsafe impl Sync for Matrix {}
// SAFETY: as above.
unsafe impl Send for MatrixMut {}
// SAFETY: as above.
unsafe impl Sync for MatrixMut {}

impl Matrix {
    /// Address of row `row` as elements of `E`.
    ///
    /// # Safety
    /// `row < rows` and `E` is this matrix's storage type.
    #[inline(always)]
    pub unsafe fn row<E>(&self, row: usize) -> *const E {
        debug_assert!(row < self.rows);
        self.ptr.cast::<E>().add(row * self.stride)
    }
}

impl MatrixMut {
    /// Address of row `row` as elements of `E`.
    ///
    /// # Safety
    /// `row < rows` and `E` is this matrix's storage type.
    #[inline(always)]
    pub unsafe fn row<E>(&self, row: usize) -> *mut E {
        debug_assert!(row < self.rows);
        self.ptr.cast::<E>().add(row * self.stride)
    }
}
