//! Sixteen lanes as an array.
use super::{LANES, Simd};
use crate::dtype::{bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16};

/// Portable implementation.
#[derive(Clone, Copy, Debug)]
pub struct Scalar;

#[inline(always)]
fn map<A: Copy, B: Copy + Default>(a: [A; LANES], f: impl Fn(A) -> B) -> [B; LANES] {
    let mut out = [B::default(); LANES];
    for i in 0..LANES {
        out[i] = f(a[i]);
    }
    out
}

#[inline(always)]
fn zip<A: Copy + Default>(a: [A; LANES], b: [A; LANES], f: impl Fn(A, A) -> A) -> [A; LANES] {
    let mut out = [A::default(); LANES];
    for i in 0..LANES {
        out[i] = f(a[i], b[i]);
    }
    out
}

impl Simd for Scalar {
    type F = [f32; LANES];
    type U = [u32; LANES];

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self::F {
        [value; LANES]
    }
    #[inline(always)]
    unsafe fn load(ptr: *const f32) -> Self::F {
        ptr.cast::<Self::F>().read_unaligned()
    }
    #[inline(always)]
    unsafe fn store(ptr: *mut f32, value: Self::F) {
        ptr.cast::<Self::F>().write_unaligned(value);
    }
    #[inline(always)]
    unsafe fn load_bf16(ptr: *const u16) -> Self::F {
        map(ptr.cast::<[u16; LANES]>().read_unaligned(), bf16_to_f32)
    }
    #[inline(always)]
    unsafe fn store_bf16(ptr: *mut u16, value: Self::F) {
        ptr.cast::<[u16; LANES]>()
            .write_unaligned(map(value, f32_to_bf16));
    }
    #[inline(always)]
    unsafe fn load_f16(ptr: *const u16) -> Self::F {
        map(ptr.cast::<[u16; LANES]>().read_unaligned(), f16_to_f32)
    }
    #[inline(always)]
    unsafe fn store_f16(ptr: *mut u16, value: Self::F) {
        ptr.cast::<[u16; LANES]>()
            .write_unaligned(map(value, f32_to_f16));
    }
    #[inline(always)]
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |x, y| x + y)
    }
    #[inline(always)]
    unsafe fn sub(a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |x, y| x - y)
    }
    #[inline(always)]
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |x, y| x * y)
    }
    #[inline(always)]
    unsafe fn div(a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |x, y| x / y)
    }
    #[inline(always)]
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        let mut out = c;
        for i in 0..LANES {
            out[i] = a[i].mul_add(b[i], c[i]);
        }
        out
    }
    #[inline(always)]
    unsafe fn max(a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |x, y| if x > y { x } else { y })
    }
    #[inline(always)]
    unsafe fn round(a: Self::F) -> Self::F {
        map(a, f32::round_ties_even)
    }
    #[inline(always)]
    unsafe fn select_lt(a: Self::F, b: Self::F, x: Self::F, y: Self::F) -> Self::F {
        let mut out = y;
        for i in 0..LANES {
            out[i] = if a[i] < b[i] { x[i] } else { y[i] };
        }
        out
    }
    #[inline(always)]
    unsafe fn splat_u(value: u32) -> Self::U {
        [value; LANES]
    }
    #[inline(always)]
    unsafe fn store_u(ptr: *mut u32, value: Self::U) {
        ptr.cast::<Self::U>().write_unaligned(value);
    }
    #[inline(always)]
    unsafe fn load_u(ptr: *const u32) -> Self::U {
        ptr.cast::<Self::U>().read_unaligned()
    }
    #[inline(always)]
    unsafe fn add_u(a: Self::U, b: Self::U) -> Self::U {
        zip(a, b, u32::wrapping_add)
    }
    #[inline(always)]
    unsafe fn sub_u(a: Self::U, b: Self::U) -> Self::U {
        zip(a, b, u32::wrapping_sub)
    }
    #[inline(always)]
    unsafe fn mul_u(a: Self::U, b: Self::U) -> Self::U {
        zip(a, b, u32::wrapping_mul)
    }
    #[inline(always)]
    unsafe fn and_u(a: Self::U, b: Self::U) -> Self::U {
        zip(a, b, |x, y| x & y)
    }
    #[inline(always)]
    unsafe fn or_u(a: Self::U, b: Self::U) -> Self::U {
        zip(a, b, |x, y| x | y)
    }
    #[inline(always)]
    unsafe fn xor_u(a: Self::U, b: Self::U) -> Self::U {
        zip(a, b, |x, y| x ^ y)
    }
    #[inline(always)]
    unsafe fn shr_u<const N: i32>(a: Self::U) -> Self::U {
        map(a, |x| x >> N)
    }
    #[inline(always)]
    unsafe fn shl_u<const N: i32>(a: Self::U) -> Self::U {
        map(a, |x| x << N)
    }
    #[inline(always)]
    unsafe fn bits(a: Self::F) -> Self::U {
        map(a, f32::to_bits)
    }
    #[inline(always)]
    unsafe fn from_bits(a: Self::U) -> Self::F {
        map(a, f32::from_bits)
    }
    #[inline(always)]
    unsafe fn i32_to_f32(a: Self::U) -> Self::F {
        map(a, |x| x as i32 as f32)
    }
    #[inline(always)]
    unsafe fn f32_to_i32(a: Self::F) -> Self::U {
        map(a, |x| x as i32 as u32)
    }
    #[inline(always)]
    unsafe fn dot(acc: Self::U, w: Self::U, x: Self::U) -> Self::U {
        let mut out = acc;
        for lane in 0..LANES {
            let (w, x) = (w[lane].to_le_bytes(), x[lane].to_le_bytes());
            for (w, x) in w.into_iter().zip(x) {
                out[lane] = out[lane].wrapping_add((i32::from(w) * i32::from(x as i8)) as u32);
            }
        }
        out
    }
    #[inline(always)]
    unsafe fn transpose8(src: *const f32, src_stride: usize, dst: *mut f32, dst_stride: usize) {
        for row in 0..8 {
            for col in 0..8 {
                *dst.add(col * dst_stride + row) = *src.add(row * src_stride + col);
            }
        }
    }
}
