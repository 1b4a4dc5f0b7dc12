//! Sixteen lanes as two 256-bit registers.
use std::arch::x86_64::*;

use super::{Kernel, Simd};

/// AVX2 with FMA and F16C.
#[derive(Clone, Copy, Debug)]
pub struct Avx2;

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn enter<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<Avx2>()
}

/// Two registers: lanes 0..8 and 8..16.
pub type F = [__m256; 2];
type U = [__m256i; 2];

#[inline(always)]
unsafe fn widen_bf16(half: __m128i) -> __m256 {
    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(half)))
}

#[inline(always)]
unsafe fn round_bf16(value: __m256) -> __m256i {
    let bits = _mm256_castps_si256(value);
    let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
    let bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
    let rounded = _mm256_srli_epi32::<16>(_mm256_add_epi32(bits, bias));
    let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(value, value));
    _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), nan)
}

#[inline(always)]
pub(super) unsafe fn transpose8(
    src: *const f32,
    src_stride: usize,
    dst: *mut f32,
    dst_stride: usize,
) {
    let row = |r: usize| _mm256_loadu_ps(src.add(r * src_stride));
    let (a0, a1, a2, a3) = (row(0), row(1), row(2), row(3));
    let (a4, a5, a6, a7) = (row(4), row(5), row(6), row(7));
    let (b0, b1) = (_mm256_unpacklo_ps(a0, a1), _mm256_unpackhi_ps(a0, a1));
    let (b2, b3) = (_mm256_unpacklo_ps(a2, a3), _mm256_unpackhi_ps(a2, a3));
    let (b4, b5) = (_mm256_unpacklo_ps(a4, a5), _mm256_unpackhi_ps(a4, a5));
    let (b6, b7) = (_mm256_unpacklo_ps(a6, a7), _mm256_unpackhi_ps(a6, a7));
    let (c0, c1) = (
        _mm256_shuffle_ps::<0x44>(b0, b2),
        _mm256_shuffle_ps::<0xee>(b0, b2),
    );
    let (c2, c3) = (
        _mm256_shuffle_ps::<0x44>(b1, b3),
        _mm256_shuffle_ps::<0xee>(b1, b3),
    );
    let (c4, c5) = (
        _mm256_shuffle_ps::<0x44>(b4, b6),
        _mm256_shuffle_ps::<0xee>(b4, b6),
    );
    let (c6, c7) = (
        _mm256_shuffle_ps::<0x44>(b5, b7),
        _mm256_shuffle_ps::<0xee>(b5, b7),
    );
    _mm256_storeu_ps(dst, _mm256_permute2f128_ps::<0x20>(c0, c4));
    _mm256_storeu_ps(dst.add(dst_stride), _mm256_permute2f128_ps::<0x20>(c1, c5));
    _mm256_storeu_ps(
        dst.add(2 * dst_stride),
        _mm256_permute2f128_ps::<0x20>(c2, c6),
    );
    _mm256_storeu_ps(
        dst.add(3 * dst_stride),
        _mm256_permute2f128_ps::<0x20>(c3, c7),
    );
    _mm256_storeu_ps(
        dst.add(4 * dst_stride),
        _mm256_permute2f128_ps::<0x31>(c0, c4),
    );
    _mm256_storeu_ps(
        dst.add(5 * dst_stride),
        _mm256_permute2f128_ps::<0x31>(c1, c5),
    );
    _mm256_storeu_ps(
        dst.add(6 * dst_stride),
        _mm256_permute2f128_ps::<0x31>(c2, c6),
    );
    _mm256_storeu_ps(
        dst.add(7 * dst_stride),
        _mm256_permute2f128_ps::<0x31>(c3, c7),
    );
}

impl Simd for Avx2 {
    type F = F;
    type U = U;

    #[inline(always)]
    unsafe fn splat(value: f32) -> F {
        [_mm256_set1_ps(value); 2]
    }
    #[inline(always)]
    unsafe fn load(ptr: *const f32) -> F {
        [_mm256_loadu_ps(ptr), _mm256_loadu_ps(ptr.add(8))]
    }
    #[inline(always)]
    unsafe fn store(ptr: *mut f32, value: F) {
        _mm256_storeu_ps(ptr, value[0]);
        _mm256_storeu_ps(ptr.add(8), value[1]);
    }
    #[inline(always)]
    unsafe fn load_bf16(ptr: *const u16) -> F {
        [
            widen_bf16(_mm_loadu_si128(ptr.cast())),
            widen_bf16(_mm_loadu_si128(ptr.add(8).cast())),
        ]
    }
    #[inline(always)]
    unsafe fn store_bf16(ptr: *mut u16, value: F) {
        let packed = _mm256_packus_epi32(round_bf16(value[0]), round_bf16(value[1]));
        _mm256_storeu_si256(ptr.cast(), _mm256_permute4x64_epi64::<0xd8>(packed));
    }
    #[inline(always)]
    unsafe fn load_f16(ptr: *const u16) -> F {
        [
            _mm256_cvtph_ps(_mm_loadu_si128(ptr.cast())),
            _mm256_cvtph_ps(_mm_loadu_si128(ptr.add(8).cast())),
        ]
    }
    #[inline(always)]
    unsafe fn store_f16(ptr: *mut u16, value: F) {
        _mm_storeu_si128(
            ptr.cast(),
            _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(value[0]),
        );
        _mm_storeu_si128(
            ptr.add(8).cast(),
            _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(value[1]),
        );
    }
    #[inline(always)]
    unsafe fn add(a: F, b: F) -> F {
        [_mm256_add_ps(a[0], b[0]), _mm256_add_ps(a[1], b[1])]
    }
    #[inline(always)]
    unsafe fn sub(a: F, b: F) -> F {
        [_mm256_sub_ps(a[0], b[0]), _mm256_sub_ps(a[1], b[1])]
    }
    #[inline(always)]
    unsafe fn mul(a: F, b: F) -> F {
        [_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])]
    }
    #[inline(always)]
    unsafe fn div(a: F, b: F) -> F {
        [_mm256_div_ps(a[0], b[0]), _mm256_div_ps(a[1], b[1])]
    }
    #[inline(always)]
    unsafe fn fma(a: F, b: F, c: F) -> F {
        [
            _mm256_fmadd_ps(a[0], b[0], c[0]),
            _mm256_fmadd_ps(a[1], b[1], c[1]),
        ]
    }
    #[inline(always)]
    unsafe fn max(a: F, b: F) -> F {
        [_mm256_max_ps(a[0], b[0]), _mm256_max_ps(a[1], b[1])]
    }
    #[inline(always)]
    unsafe fn round(a: F) -> F {
        const MODE: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
        [_mm256_round_ps::<MODE>(a[0]), _mm256_round_ps::<MODE>(a[1])]
    }
    #[inline(always)]
    unsafe fn select_lt(a: F, b: F, x: F, y: F) -> F {
        let lo = _mm256_cmp_ps::<_CMP_LT_OQ>(a[0], b[0]);
        let hi = _mm256_cmp_ps::<_CMP_LT_OQ>(a[1], b[1]);
        [
            _mm256_blendv_ps(y[0], x[0], lo),
            _mm256_blendv_ps(y[1], x[1], hi),
        ]
    }
    #[inline(always)]
    unsafe fn splat_u(value: u32) -> U {
        [_mm256_set1_epi32(value as i32); 2]
    }
    #[inline(always)]
    unsafe fn store_u(ptr: *mut u32, value: U) {
        _mm256_storeu_si256(ptr.cast(), value[0]);
        _mm256_storeu_si256(ptr.add(8).cast(), value[1]);
    }
    #[inline(always)]
    unsafe fn load_u(ptr: *const u32) -> U {
        [
            _mm256_loadu_si256(ptr.cast()),
            _mm256_loadu_si256(ptr.add(8).cast()),
        ]
    }
    #[inline(always)]
    unsafe fn add_u(a: U, b: U) -> U {
        [_mm256_add_epi32(a[0], b[0]), _mm256_add_epi32(a[1], b[1])]
    }
    #[inline(always)]
    unsafe fn sub_u(a: U, b: U) -> U {
        [_mm256_sub_epi32(a[0], b[0]), _mm256_sub_epi32(a[1], b[1])]
    }
    #[inline(always)]
    unsafe fn mul_u(a: U, b: U) -> U {
        [
            _mm256_mullo_epi32(a[0], b[0]),
            _mm256_mullo_epi32(a[1], b[1]),
        ]
    }
    #[inline(always)]
    unsafe fn and_u(a: U, b: U) -> U {
        [_mm256_and_si256(a[0], b[0]), _mm256_and_si256(a[1], b[1])]
    }
    #[inline(always)]
    unsafe fn or_u(a: U, b: U) -> U {
        [_mm256_or_si256(a[0], b[0]), _mm256_or_si256(a[1], b[1])]
    }
    #[inline(always)]
    unsafe fn xor_u(a: U, b: U) -> U {
        [_mm256_xor_si256(a[0], b[0]), _mm256_xor_si256(a[1], b[1])]
    }
    #[inline(always)]
    unsafe fn shr_u<const N: i32>(a: U) -> U {
        [_mm256_srli_epi32::<N>(a[0]), _mm256_srli_epi32::<N>(a[1])]
    }
    #[inline(always)]
    unsafe fn shl_u<const N: i32>(a: U) -> U {
        [_mm256_slli_epi32::<N>(a[0]), _mm256_slli_epi32::<N>(a[1])]
    }
    #[inline(always)]
    unsafe fn bits(a: F) -> U {
        [_mm256_castps_si256(a[0]), _mm256_castps_si256(a[1])]
    }
    #[inline(always)]
    unsafe fn from_bits(a: U) -> F {
        [_mm256_castsi256_ps(a[0]), _mm256_castsi256_ps(a[1])]
    }
    #[inline(always)]
    unsafe fn i32_to_f32(a: U) -> F {
        [_mm256_cvtepi32_ps(a[0]), _mm256_cvtepi32_ps(a[1])]
    }
    #[inline(always)]
    unsafe fn f32_to_i32(a: F) -> U {
        [_mm256_cvtps_epi32(a[0]), _mm256_cvtps_epi32(a[1])]
    }
    #[inline(always)]
    unsafe fn dot(acc: U, w: U, x: U) -> U {
        let half = |acc, w, x| {
            let pairs = _mm256_maddubs_epi16(w, x);
            _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
        };
        [half(acc[0], w[0], x[0]), half(acc[1], w[1], x[1])]
    }
    #[inline(always)]
    unsafe fn transpose8(src: *const f32, src_stride: usize, dst: *mut f32, dst_stride: usize) {
        transpose8(src, src_stride, dst, dst_stride);
    }
}
