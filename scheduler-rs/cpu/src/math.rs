//! Elementary functions on lanes, from a fixed sequence of IEEE operations.
use crate::simd::Simd;

/// `e^x`, relative error below 2e-7 for x in [-87, 88]; exactly 0 below -87, `e^88` above 88.
///
/// Cody-Waite reduction by ln 2 and a polynomial of degree 6 on [-ln 2 / 2, ln 2 / 2].
#[inline(always)]
pub unsafe fn exp<S: Simd>(x: S::F) -> S::F {
    let clamped = S::max(S::splat(-87.0), x); // this order keeps NaN
    let clamped = S::select_lt(S::splat(88.0), clamped, S::splat(88.0), clamped);
    let n = S::round(S::mul(clamped, S::splat(std::f32::consts::LOG2_E)));
    let r = S::fma(n, S::splat(-0.693_359_4), clamped);
    let r = S::fma(n, S::splat(2.121_944_4e-4), r);
    let mut poly = S::splat(1.0 / 720.0);
    for coefficient in [1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        poly = S::fma(poly, r, S::splat(coefficient));
    }
    let exponent = S::add_u(S::f32_to_i32(n), S::splat_u(127));
    let scaled = S::mul(poly, S::from_bits(S::shl_u::<23>(exponent)));
    S::select_lt(x, S::splat(-87.0), S::splat(0.0), scaled)
}

/// `ln x` for normal positive x, relative error below 3e-7 (also next to 1).
///
/// x = 2^e m with m in [sqrt(1/2), sqrt(2)); ln m = 2 atanh(s), s = (m - 1) / (m + 1), as an odd series in s.
#[inline(always)]
pub unsafe fn ln<S: Simd>(x: S::F) -> S::F {
    const SQRT_HALF_BITS: u32 = 0x3f35_04f3;
    let shifted = S::sub_u(S::bits(x), S::splat_u(SQRT_HALF_BITS));
    // arithmetic shift of a value whose top 9 bits are the exponent: bias it to stay unsigned
    let biased = S::add_u(shifted, S::splat_u(0x4000_0000));
    let exponent = S::sub_u(S::shr_u::<23>(biased), S::splat_u(128));
    let mantissa = S::add_u(
        S::and_u(shifted, S::splat_u(0x007f_ffff)),
        S::splat_u(SQRT_HALF_BITS),
    );
    let m = S::from_bits(mantissa);
    let e = S::i32_to_f32(exponent);
    let f = S::sub(m, S::splat(1.0));
    let s = S::div(f, S::add(m, S::splat(1.0)));
    let s2 = S::mul(s, s);
    let mut poly = S::splat(2.0 / 11.0);
    for coefficient in [2.0 / 9.0, 2.0 / 7.0, 2.0 / 5.0, 2.0 / 3.0] {
        poly = S::fma(poly, s2, S::splat(coefficient));
    }
    let tail = S::mul(S::mul(s, s2), poly);
    let head = S::fma(e, S::splat(-2.121_944_4e-4), tail);
    let head = S::fma(S::splat(2.0), s, head);
    S::fma(e, S::splat(0.693_359_4), head)
}
