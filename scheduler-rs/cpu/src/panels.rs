//! Weights repacked once so that sixteen output features lie side by side.
use crate::buffer::AlignedBuffer;
use crate::dtype::{Dtype, Element};
use crate::matrix::Matrix;
use crate::simd::LANES;
use crate::with_element;

/// A weight matrix W `[out, in]` as panels `[ceil(out / 16)][in][16]` in its own storage type, and an optional bias.
///
/// Panels of other formats (int8 or int4 with scales) belong beside `data`: the product only asks a panel for
/// "sixteen fp32 lanes at depth i".
#[derive(Debug)]
pub struct PackedWeight {
    data: AlignedBuffer,
    bias: Vec<f32>, // empty, or ceil(out / 16) * 16
    dtype: Dtype,
    out_features: usize,
    in_features: usize,
}

impl PackedWeight {
    /// Packs `weight`; the missing features of the last panel are zero.
    ///
    /// # Safety
    /// `weight` is readable; `bias`, when given, has one value per row of `weight`.
    pub unsafe fn pack(weight: Matrix, bias: Option<&[f32]>) -> PackedWeight {
        let panels = weight.rows.div_ceil(LANES);
        let mut data = AlignedBuffer::zeroed(panels * weight.cols * LANES * weight.dtype.size());
        with_element!(
            weight.dtype,
            E,
            pack_elements::<E>(weight, data.as_mut_ptr())
        );
        let bias = bias.map_or_else(Vec::new, |values| {
            let mut padded = vec![0.0; panels * LANES];
            padded[..values.len()].copy_from_slice(values);
            padded
        });
        PackedWeight {
            data,
            bias,
            dtype: weight.dtype,
            out_features: weight.rows,
            in_features: weight.cols,
        }
    }

    /// Rows of W.
    pub fn out_features(&self) -> usize {
        self.out_features
    }

    /// Columns of W.
    pub fn in_features(&self) -> usize {
        self.in_features
    }

    /// Storage type of the panels.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Bytes held.
    pub fn num_bytes(&self) -> usize {
        self.data.len() + self.bias.len() * 4
    }

    /// Bias padded to whole panels, or empty.
    pub(crate) fn bias(&self) -> &[f32] {
        &self.bias
    }

    /// First panel; panels are `in_features * 16` elements apart.
    pub(crate) fn panels<E: Element>(&self) -> *const E {
        debug_assert!(E::DTYPE == self.dtype);
        self.data.as_ptr()
    }
}

unsafe fn pack_elements<E: Element>(weight: Matrix, data: *mut E) {
    for row in 0..weight.rows {
        let source = weight.row::<E>(row);
        let target = data.add((row / LANES) * weight.cols * LANES + row % LANES);
        for col in 0..weight.cols {
            *target.add(col * LANES) = *source.add(col);
        }
    }
}
