//! Sixteen lanes as one 512-bit register.
use std::arch::x86_64::*;

use super::{Kernel, Simd, avx2};

/// AVX-512 F and BW (with AVX2, FMA and F16C), and VNNI or not.
#[derive(Clone, Copy, Debug)]
pub struct Avx512<const VNNI: bool>;

#[target_feature(enable = "avx512f,avx512bw,avx2,fma,f16c")]
pub(super) unsafe fn enter<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<Avx512<false>>()
}

#[target_feature(enable = "avx512f,avx512bw,avx512vnni,avx2,fma,f16c")]
pub(super) unsafe fn enter_vnni<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<Avx512<true>>()
}

impl<const VNNI: bool> Simd for Avx512<VNNI> {
    type F = __m512;
    type U = __m512i;

    #[inline(always)]
    unsafe fn splat(value: f32) -> __m512 {
        _mm512_set1_ps(value)
    }
    #[inline(always)]
    unsafe fn load(ptr: *const f32) -> __m512 {
        _mm512_loadu_ps(ptr)
    }
    #[inline(always)]
    unsafe fn store(ptr: *mut f32, value: __m512) {
        _mm512_storeu_ps(ptr, value);
    }
    #[inline(always)]
    unsafe fn load_bf16(ptr: *const u16) -> __m512 {
        let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(ptr.cast()));
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
    }
    #[inline(always)]
    unsafe fn store_bf16(ptr: *mut u16, value: __m512) {
        let bits = _mm512_castps_si512(value);
        let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
        let bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
        let rounded = _mm512_srli_epi32::<16>(_mm512_add_epi32(bits, bias));
        let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(value, value);
        let fixed = _mm512_mask_blend_epi32(nan, rounded, _mm512_set1_epi32(0x7fc0));
        _mm256_storeu_si256(ptr.cast(), _mm512_cvtepi32_epi16(fixed));
    }
    #[inline(always)]
    unsafe fn load_f16(ptr: *const u16) -> __m512 {
        _mm512_cvtph_ps(_mm256_loadu_si256(ptr.cast()))
    }
    #[inline(always)]
    unsafe fn store_f16(ptr: *mut u16, value: __m512) {
        _mm256_storeu_si256(
            ptr.cast(),
            _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(value),
        );
    }
    #[inline(always)]
    unsafe fn add(a: __m512, b: __m512) -> __m512 {
        _mm512_add_ps(a, b)
    }
    #[inline(always)]
    unsafe fn sub(a: __m512, b: __m512) -> __m512 {
        _mm512_sub_ps(a, b)
    }
    #[inline(always)]
    unsafe fn mul(a: __m512, b: __m512) -> __m512 {
        _mm512_mul_ps(a, b)
    }
    #[inline(always)]
    unsafe fn div(a: __m512, b: __m512) -> __m512 {
        _mm512_div_ps(a, b)
    }
    #[inline(always)]
    unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
        _mm512_fmadd_ps(a, b, c)
    }
    #[inline(always)]
    unsafe fn max(a: __m512, b: __m512) -> __m512 {
        _mm512_max_ps(a, b)
    }
    #[inline(always)]
    unsafe fn round(a: __m512) -> __m512 {
        _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a)
    }
    #[inline(always)]
    unsafe fn select_lt(a: __m512, b: __m512, x: __m512, y: __m512) -> __m512 {
        _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b), y, x)
    }
    #[inline(always)]
    unsafe fn splat_u(value: u32) -> __m512i {
        _mm512_set1_epi32(value as i32)
    }
    #[inline(always)]
    unsafe fn store_u(ptr: *mut u32, value: __m512i) {
        _mm512_storeu_si512(ptr.cast(), value);
    }
    #[inline(always)]
    unsafe fn load_u(ptr: *const u32) -> __m512i {
        _mm512_loadu_si512(ptr.cast())
    }
    #[inline(always)]
    unsafe fn add_u(a: __m512i, b: __m512i) -> __m512i {
        _mm512_add_epi32(a, b)
    }
    #[inline(always)]
    unsafe fn sub_u(a: __m512i, b: __m512i) -> __m512i {
        _mm512_sub_epi32(a, b)
    }
    #[inline(always)]
    unsafe fn mul_u(a: __m512i, b: __m512i) -> __m512i {
        _mm512_mullo_epi32(a, b)
    }
    #[inline(always)]
    unsafe fn and_u(a: __m512i, b: __m512i) -> __m512i {
        _mm512_and_si512(a, b)
    }
    #[inline(always)]
    unsafe fn or_u(a: __m512i, b: __m512i) -> __m512i {
        _mm512_or_si512(a, b)
    }
    #[inline(always)]
    unsafe fn xor_u(a: __m512i, b: __m512i) -> __m512i {
        _mm512_xor_si512(a, b)
    }
    #[inline(always)]
    unsafe fn shr_u<const N: i32>(a: __m512i) -> __m512i {
        _mm512_srl_epi32(a, _mm_cvtsi32_si128(N))
    }
    #[inline(always)]
    unsafe fn shl_u<const N: i32>(a: __m512i) -> __m512i {
        _mm512_sll_epi32(a, _mm_cvtsi32_si128(N))
    }
    #[inline(always)]
    unsafe fn bits(a: __m512) -> __m512i {
        _mm512_castps_si512(a)
    }
    #[inline(always)]
    unsafe fn from_bits(a: __m512i) -> __m512 {
        _mm512_castsi512_ps(a)
    }
    #[inline(always)]
    unsafe fn i32_to_f32(a: __m512i) -> __m512 {
        _mm512_cvtepi32_ps(a)
    }
    #[inline(always)]
    unsafe fn f32_to_i32(a: __m512) -> __m512i {
        _mm512_cvtps_epi32(a)
    }
    #[inline(always)]
    unsafe fn dot(acc: __m512i, w: __m512i, x: __m512i) -> __m512i {
        if VNNI {
            return _mm512_dpbusd_epi32(acc, w, x);
        }
        let pairs = _mm512_maddubs_epi16(w, x);
        _mm512_add_epi32(acc, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)))
    }
    #[inline(always)]
    unsafe fn dot_u8(acc: __m512i, w: __m512i, x: __m512i) -> __m512i {
        if VNNI {
            return _mm512_dpbusd_epi32(acc, w, x);
        }
        let low = _mm512_and_si512(w, _mm512_set1_epi8(0x7f));
        let high = _mm512_andnot_si512(_mm512_set1_epi8(0x7f), w);
        Self::dot(Self::dot(acc, low, x), high, x)
    }
    #[inline(always)]
    unsafe fn transpose8(src: *const f32, src_stride: usize, dst: *mut f32, dst_stride: usize) {
        avx2::transpose8(src, src_stride, dst, dst_stride);
    }
}
