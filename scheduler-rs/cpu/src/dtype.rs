//! Storage types of tensors and their exact conversions to and from fp32.
use crate::simd::{LANES, Simd};

/// Storage type of a tensor's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dtype {
    /// 32-bit IEEE.
    F32,
    /// bfloat16.
    Bf16,
    /// 16-bit IEEE.
    F16,
}

impl Dtype {
    /// Bytes of one element.
    pub fn size(self) -> usize {
        match self {
            Dtype::F32 => 4,
            Dtype::Bf16 | Dtype::F16 => 2,
        }
    }
}

/// Runs a block with `$elem` bound to the element type of a `Dtype`.
#[macro_export]
macro_rules! with_element {
    ($dtype:expr, $elem:ident, $body:expr) => {
        match $dtype {
            $crate::dtype::Dtype::F32 => {
                type $elem = f32;
                $body
            }
            $crate::dtype::Dtype::Bf16 => {
                type $elem = $crate::dtype::Bf16;
                $body
            }
            $crate::dtype::Dtype::F16 => {
                type $elem = $crate::dtype::F16;
                $body
            }
        }
    };
}

/// An element as it lies in memory; 16 of them convert to and from fp32 lanes.
pub trait Element: Copy + Send + Sync + 'static {
    /// The runtime name of this type.
    const DTYPE: Dtype;

    /// Widens 16 elements.
    ///
    /// # Safety
    /// `ptr` is readable for 16 elements; the caller runs under `S`'s CPU features.
    unsafe fn load<S: Simd>(ptr: *const Self) -> S::F;

    /// Rounds 16 lanes to nearest even and stores them.
    ///
    /// # Safety
    /// `ptr` is writable for 16 elements; the caller runs under `S`'s CPU features.
    unsafe fn store<S: Simd>(ptr: *mut Self, value: S::F);

    /// Rounds every lane to this type and widens it again.
    ///
    /// # Safety
    /// The caller runs under `S`'s CPU features.
    #[inline(always)]
    unsafe fn rounded<S: Simd>(value: S::F) -> S::F {
        let mut lanes = [Self::zero(); LANES];
        Self::store::<S>(lanes.as_mut_ptr(), value);
        Self::load::<S>(lanes.as_ptr())
    }

    /// Positive zero.
    fn zero() -> Self;
}

/// bfloat16 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct Bf16(pub u16);

/// IEEE half bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct F16(pub u16);

impl Element for f32 {
    const DTYPE: Dtype = Dtype::F32;
    #[inline(always)]
    unsafe fn load<S: Simd>(ptr: *const Self) -> S::F {
        S::load(ptr)
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(ptr: *mut Self, value: S::F) {
        S::store(ptr, value);
    }
    #[inline(always)]
    unsafe fn rounded<S: Simd>(value: S::F) -> S::F {
        value
    }
    #[inline(always)]
    fn zero() -> Self {
        0.0
    }
}

impl Element for Bf16 {
    const DTYPE: Dtype = Dtype::Bf16;
    #[inline(always)]
    unsafe fn load<S: Simd>(ptr: *const Self) -> S::F {
        S::load_bf16(ptr.cast())
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(ptr: *mut Self, value: S::F) {
        S::store_bf16(ptr.cast(), value);
    }
    #[inline(always)]
    unsafe fn rounded<S: Simd>(value: S::F) -> S::F {
        // a NaN that came from bfloat16 inputs has a zero low half, so the carry cannot turn it into a number
        let bits = S::bits(value);
        let odd = S::and_u(S::shr_u::<16>(bits), S::splat_u(1));
        let raised = S::add_u(bits, S::add_u(odd, S::splat_u(0x7fff)));
        S::from_bits(S::and_u(raised, S::splat_u(0xffff_0000)))
    }
    #[inline(always)]
    fn zero() -> Self {
        Bf16(0)
    }
}

impl Element for F16 {
    const DTYPE: Dtype = Dtype::F16;
    #[inline(always)]
    unsafe fn load<S: Simd>(ptr: *const Self) -> S::F {
        S::load_f16(ptr.cast())
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(ptr: *mut Self, value: S::F) {
        S::store_f16(ptr.cast(), value);
    }
    #[inline(always)]
    fn zero() -> Self {
        F16(0)
    }
}

/// Widens the first `count` (0..=16) elements; the other lanes are zero.
///
/// # Safety
/// `ptr` is readable for `count` elements; the caller runs under `S`'s CPU features.
#[inline(always)]
pub unsafe fn load_partial<S: Simd, E: Element>(ptr: *const E, count: usize) -> S::F {
    if count == LANES {
        return E::load::<S>(ptr);
    }
    let mut lanes = [E::zero(); LANES];
    std::ptr::copy_nonoverlapping(ptr, lanes.as_mut_ptr(), count);
    E::load::<S>(lanes.as_ptr())
}

/// Stores the first `count` (0..=16) lanes.
///
/// # Safety
/// `ptr` is writable for `count` elements; the caller runs under `S`'s CPU features.
#[inline(always)]
pub unsafe fn store_partial<S: Simd, E: Element>(ptr: *mut E, value: S::F, count: usize) {
    if count == LANES {
        return E::store::<S>(ptr, value);
    }
    let mut lanes = [E::zero(); LANES];
    E::store::<S>(lanes.as_mut_ptr(), value);
    std::ptr::copy_nonoverlapping(lanes.as_ptr(), ptr, count);
}

/// Widens bfloat16 bits; exact.
pub fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// Rounds to bfloat16, nearest even; NaN becomes 0x7FC0.
pub fn f32_to_bf16(value: f32) -> u16 {
    if value.is_nan() {
        return 0x7fc0;
    }
    let bits = value.to_bits();
    let bias = 0x7fff + ((bits >> 16) & 1);
    ((bits.wrapping_add(bias)) >> 16) as u16
}

/// Widens IEEE half bits; exact. A NaN keeps its payload and becomes quiet, as the F16C instruction has it.
pub fn f16_to_f32(bits: u16) -> f32 {
    let sign = u32::from(bits & 0x8000) << 16;
    let exponent = u32::from((bits >> 10) & 0x1f);
    let mantissa = u32::from(bits & 0x3ff);
    let magnitude = match (exponent, mantissa) {
        (0, _) => (mantissa as f32 * f32::from_bits(0x3380_0000)).to_bits(), // mantissa * 2^-24, exact
        (31, 0) => 0x7f80_0000,
        (31, _) => 0x7fc0_0000 | (mantissa << 13),
        _ => ((exponent + 112) << 23) | (mantissa << 13),
    };
    f32::from_bits(sign | magnitude)
}

/// Rounds to IEEE half, nearest even. A NaN keeps the top of its payload and becomes quiet.
pub fn f32_to_f16(value: f32) -> u16 {
    let bits = value.to_bits();
    let sign = ((bits >> 16) & 0x8000) as u16;
    let magnitude = bits & 0x7fff_ffff;
    if magnitude > 0x7f80_0000 {
        return sign | 0x7e00 | ((magnitude >> 13) & 0x3ff) as u16;
    }
    if magnitude >= 0x4780_0000 {
        return sign | 0x7c00; // 2^16 and above, infinity
    }
    if magnitude < 0x3880_0000 {
        // below 2^-14: adding 0.5 leaves the value's multiple of 2^-24, rounded to even, in the low mantissa bits
        let shifted = f32::from_bits(magnitude) + 0.5;
        return sign | (shifted.to_bits() - 0x3f00_0000) as u16;
    }
    let bias = 0xfff + ((magnitude >> 13) & 1);
    sign | (((magnitude + bias) >> 13) - (112 << 10)) as u16
}
