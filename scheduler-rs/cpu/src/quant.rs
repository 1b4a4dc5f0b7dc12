//! Weights of four or eight bits in groups of 32 input features, each with its own scale.
//!
//! Four bits: w = d q + m with q in 0..=15, as in GGUF's Q4_1. Eight bits: w = d q with q in -127..=127, as in Q8_0.
//! d and m are IEEE halves. A weight that was quantised so before is found again exactly.
use crate::buffer::AlignedBuffer;
use crate::dtype::{Element, f16_to_f32, f32_to_f16};
use crate::matrix::Matrix;
use crate::simd::{LANES, Scalar};
use crate::with_element;

/// Input features that share a scale.
pub const GROUP: usize = 32;
/// Added to an eight-bit weight, so that it is stored without a sign.
pub(crate) const OFFSET: i32 = 128;

/// Bits of a weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bits {
    /// Scale and minimum a group.
    Four,
    /// Scale a group.
    Eight,
}

impl Bits {
    /// Bytes of sixteen output features' group: halves first (d, then m), then `[GROUP / 4][16][4]` weights; of four
    /// bits those of features 8 i .. 8 i + 4 are the low half bytes, the next four the high ones.
    pub(crate) const fn block_bytes(self) -> usize {
        match self {
            Bits::Four => 2 * LANES * 2 + LANES * GROUP / 2,
            Bits::Eight => LANES * 2 + LANES * GROUP,
        }
    }
}

/// A weight matrix W `[out, in]` as panels `[ceil(out / 16)][in / 32]` of blocks, and an optional bias.
#[derive(Debug)]
pub struct QuantWeight {
    data: AlignedBuffer,
    bias: Vec<f32>, // empty, or ceil(out / 16) * 16
    bits: Bits,
    out_features: usize,
    in_features: usize,
}

impl QuantWeight {
    /// Quantises `weight`; the missing features of the last panel are zero. None unless its columns are whole groups.
    ///
    /// # Safety
    /// `weight` is readable; `bias`, when given, has one value per row of `weight`.
    pub unsafe fn pack(weight: Matrix, bias: Option<&[f32]>, bits: Bits) -> Option<QuantWeight> {
        if weight.cols == 0 || !weight.cols.is_multiple_of(GROUP) {
            return None;
        }
        let (panels, groups) = (weight.rows.div_ceil(LANES), weight.cols / GROUP);
        let mut data = AlignedBuffer::zeroed(panels * groups * bits.block_bytes());
        let blocks: *mut u8 = data.as_mut_ptr();
        with_element!(weight.dtype, E, {
            for row in 0..weight.rows {
                for group in 0..groups {
                    let values = read_group::<E>(weight.row::<E>(row).add(group * GROUP));
                    let block = blocks.add(((row / LANES) * groups + group) * bits.block_bytes());
                    match bits {
                        Bits::Four => put_four(&values, block, row % LANES),
                        Bits::Eight => put_eight(&values, block, row % LANES),
                    }
                }
            }
        });
        let bias = bias.map_or_else(Vec::new, |values| {
            let mut padded = vec![0.0; panels * LANES];
            padded[..values.len()].copy_from_slice(values);
            padded
        });
        Some(QuantWeight {
            data,
            bias,
            bits,
            out_features: weight.rows,
            in_features: weight.cols,
        })
    }

    /// Rows of W.
    pub fn out_features(&self) -> usize {
        self.out_features
    }

    /// Columns of W.
    pub fn in_features(&self) -> usize {
        self.in_features
    }

    /// Bits of a weight.
    pub fn bits(&self) -> Bits {
        self.bits
    }

    /// Bytes held.
    pub fn num_bytes(&self) -> usize {
        self.data.len() + self.bias.len() * 4
    }

    /// Bias padded to whole panels, or empty.
    pub(crate) fn bias(&self) -> &[f32] {
        &self.bias
    }

    /// First block; a panel has `in_features / GROUP` of them.
    pub(crate) fn blocks(&self) -> *const u8 {
        self.data.as_ptr()
    }

    /// Row `row` as the product sees it.
    pub fn dequantized(&self, row: usize) -> Vec<f32> {
        let groups = self.in_features / GROUP;
        let mut out = Vec::with_capacity(self.in_features);
        let lane = row % LANES;
        for group in 0..groups {
            // SAFETY: the block is within the buffer; halves are aligned to two bytes.
            unsafe {
                let at = ((row / LANES) * groups + group) * self.bits.block_bytes();
                let block = self.blocks().add(at);
                let d = f16_to_f32(*block.cast::<u16>().add(lane));
                for feature in 0..GROUP {
                    out.push(match self.bits {
                        Bits::Four => {
                            let m = f16_to_f32(*block.cast::<u16>().add(LANES + lane));
                            let (byte, shift) = place_of_four(feature, lane);
                            d.mul_add(f32::from(*block.add(byte) >> shift & 15), m)
                        }
                        Bits::Eight => {
                            let byte = *block.add(place_of_eight(feature, lane));
                            d * (i32::from(byte) - OFFSET) as f32
                        }
                    });
                }
            }
        }
        out
    }
}

unsafe fn read_group<E: Element>(ptr: *const E) -> [f32; GROUP] {
    let mut values = [0.0; GROUP];
    for half in 0..GROUP / LANES {
        let lanes = E::load::<Scalar>(ptr.add(half * LANES));
        values[half * LANES..(half + 1) * LANES].copy_from_slice(&lanes);
    }
    values
}

/// Byte of a block and shift within it.
const fn place_of_four(feature: usize, lane: usize) -> (usize, usize) {
    let byte = 4 * LANES + (feature / 8) * 4 * LANES + 4 * lane + feature % 4;
    (byte, if feature % 8 < 4 { 0 } else { 4 })
}

const fn place_of_eight(feature: usize, lane: usize) -> usize {
    2 * LANES + (feature / 4) * 4 * LANES + 4 * lane + feature % 4
}

unsafe fn put_four(values: &[f32; GROUP], block: *mut u8, lane: usize) {
    let least = values.iter().copied().fold(f32::INFINITY, f32::min);
    let most = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let (d, m) = (f32_to_f16((most - least) / 15.0), f32_to_f16(least));
    *block.cast::<u16>().add(lane) = d;
    *block.cast::<u16>().add(LANES + lane) = m;
    let (d, m) = (f16_to_f32(d), f16_to_f32(m));
    for (feature, value) in values.iter().enumerate() {
        let steps = if d > 0.0 { (value - m) / d } else { 0.0 };
        let (byte, shift) = place_of_four(feature, lane);
        *block.add(byte) |= (steps.round_ties_even().clamp(0.0, 15.0) as u8) << shift;
    }
}

unsafe fn put_eight(values: &[f32; GROUP], block: *mut u8, lane: usize) {
    let most = values
        .iter()
        .fold(0.0f32, |most, value| most.max(value.abs()));
    let d = f32_to_f16(most / 127.0);
    *block.cast::<u16>().add(lane) = d;
    let d = f16_to_f32(d);
    for (feature, value) in values.iter().enumerate() {
        let steps = if d > 0.0 { value / d } else { 0.0 };
        let steps = steps.round_ties_even().clamp(-127.0, 127.0) as i32;
        *block.add(place_of_eight(feature, lane)) = (steps + OFFSET) as u8;
    }
}
