//! Sixteen fp32 lanes, whatever the machine has: one AVX-512 register, two AVX2 registers or a plain array.
//!
//! All implementations perform the same IEEE operations lane by lane, so their results are equal bit for bit.
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod scalar;

#[cfg(target_arch = "x86_64")]
pub use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub use avx512::Avx512;
pub use scalar::Scalar;

/// Lanes of [`Simd::F`] and [`Simd::U`].
pub const LANES: usize = 16;

/// Operations on sixteen lanes.
///
/// # Safety
/// Every method needs the CPU features of the implementation, and valid pointers for 16 elements.
#[allow(missing_docs, clippy::missing_safety_doc)]
pub trait Simd: Copy + Send + Sync + 'static {
    /// Sixteen fp32.
    type F: Copy;
    /// Sixteen u32.
    type U: Copy;

    unsafe fn splat(value: f32) -> Self::F;
    unsafe fn load(ptr: *const f32) -> Self::F;
    unsafe fn store(ptr: *mut f32, value: Self::F);
    unsafe fn load_bf16(ptr: *const u16) -> Self::F;
    unsafe fn store_bf16(ptr: *mut u16, value: Self::F);
    unsafe fn load_f16(ptr: *const u16) -> Self::F;
    unsafe fn store_f16(ptr: *mut u16, value: Self::F);

    unsafe fn add(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn sub(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn div(a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`, rounded once.
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// `a > b ? a : b`: the second operand when either is NaN.
    unsafe fn max(a: Self::F, b: Self::F) -> Self::F;
    /// To the nearest integer, ties to even.
    unsafe fn round(a: Self::F) -> Self::F;
    /// `a < b ? x : y`, lane by lane.
    unsafe fn select_lt(a: Self::F, b: Self::F, x: Self::F, y: Self::F) -> Self::F;

    unsafe fn splat_u(value: u32) -> Self::U;
    unsafe fn store_u(ptr: *mut u32, value: Self::U);
    unsafe fn load_u(ptr: *const u32) -> Self::U;
    unsafe fn add_u(a: Self::U, b: Self::U) -> Self::U;
    unsafe fn sub_u(a: Self::U, b: Self::U) -> Self::U;
    unsafe fn mul_u(a: Self::U, b: Self::U) -> Self::U;
    unsafe fn and_u(a: Self::U, b: Self::U) -> Self::U;
    unsafe fn or_u(a: Self::U, b: Self::U) -> Self::U;
    unsafe fn xor_u(a: Self::U, b: Self::U) -> Self::U;
    unsafe fn shr_u<const N: i32>(a: Self::U) -> Self::U;
    unsafe fn shl_u<const N: i32>(a: Self::U) -> Self::U;
    unsafe fn bits(a: Self::F) -> Self::U;
    unsafe fn from_bits(a: Self::U) -> Self::F;
    /// Converts lanes as signed 32-bit integers; exact below 2^24.
    unsafe fn i32_to_f32(a: Self::U) -> Self::F;
    /// Converts lanes holding integers to signed 32-bit integers.
    unsafe fn f32_to_i32(a: Self::F) -> Self::U;

    /// `acc + w[0] x[0] + .. + w[3] x[3]` by lane, of bytes: w unsigned and at most 128, x signed and at least -127.
    unsafe fn dot(acc: Self::U, w: Self::U, x: Self::U) -> Self::U;

    /// As `dot`, with any unsigned byte in w.
    #[inline(always)]
    unsafe fn dot_u8(acc: Self::U, w: Self::U, x: Self::U) -> Self::U {
        let low = Self::and_u(w, Self::splat_u(0x7f7f_7f7f));
        let high = Self::and_u(w, Self::splat_u(0x8080_8080));
        Self::dot(Self::dot(acc, low, x), high, x)
    }

    /// `dst[c * dst_stride + r] = src[r * src_stride + c]` for an 8 x 8 block.
    unsafe fn transpose8(src: *const f32, src_stride: usize, dst: *mut f32, dst_stride: usize);

    /// Asks for the cache line at `ptr`; a hint, valid for any address.
    #[inline(always)]
    unsafe fn prefetch(ptr: *const u8) {
        let _ = ptr;
        #[cfg(target_arch = "x86_64")]
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(ptr.cast());
    }

    /// Sum of the lanes by halving: (0..8) + (8..16), then (0..4) + (4..8), and so on.
    #[inline(always)]
    unsafe fn sum(a: Self::F) -> f32 {
        let mut lanes = [0.0f32; LANES];
        Self::store(lanes.as_mut_ptr(), a);
        let mut width = LANES / 2;
        while width > 0 {
            for i in 0..width {
                lanes[i] += lanes[i + width];
            }
            width /= 2;
        }
        lanes[0]
    }

    /// Greatest lane; NaN lanes may be dropped.
    #[inline(always)]
    unsafe fn max_lane(a: Self::F) -> f32 {
        let mut lanes = [0.0f32; LANES];
        Self::store(lanes.as_mut_ptr(), a);
        let mut best = lanes[0];
        for lane in &lanes[1..] {
            best = if *lane > best { *lane } else { best };
        }
        best
    }
}

/// Which implementation of [`Simd`] to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// Portable code; fast only where the compiler's target has fused multiply-add.
    Scalar,
    /// AVX2, FMA, F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX-512 F and BW with the above.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// AVX-512 VNNI with the above.
    #[cfg(target_arch = "x86_64")]
    Avx512Vnni,
}

impl Level {
    /// The widest level that this CPU has.
    pub fn detect() -> Level {
        #[cfg(target_arch = "x86_64")]
        if std::arch::is_x86_feature_detected!("avx2")
            && std::arch::is_x86_feature_detected!("fma")
            && std::arch::is_x86_feature_detected!("f16c")
        {
            if std::arch::is_x86_feature_detected!("avx512f")
                && std::arch::is_x86_feature_detected!("avx512bw")
            {
                return if std::arch::is_x86_feature_detected!("avx512vnni") {
                    Level::Avx512Vnni
                } else {
                    Level::Avx512
                };
            }
            return Level::Avx2;
        }
        Level::Scalar
    }

    /// Every level this CPU can run, the portable one first.
    pub fn available() -> Vec<Level> {
        match Level::detect() {
            Level::Scalar => vec![Level::Scalar],
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => vec![Level::Scalar, Level::Avx2],
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => vec![Level::Scalar, Level::Avx2, Level::Avx512],
            #[cfg(target_arch = "x86_64")]
            Level::Avx512Vnni => {
                vec![Level::Scalar, Level::Avx2, Level::Avx512, Level::Avx512Vnni]
            }
        }
    }

    /// Lower-case name, for logs.
    pub fn name(self) -> &'static str {
        match self {
            Level::Scalar => "scalar",
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => "avx512",
            #[cfg(target_arch = "x86_64")]
            Level::Avx512Vnni => "avx512_vnni",
        }
    }

    /// Runs `kernel` compiled for this level.
    ///
    /// # Safety
    /// The CPU has this level's features, and `kernel`'s own contract holds.
    #[inline]
    pub unsafe fn run<K: Kernel>(self, kernel: K) -> K::Output {
        match self {
            Level::Scalar => kernel.run::<Scalar>(),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => avx2::enter(kernel),
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => avx512::enter(kernel),
            #[cfg(target_arch = "x86_64")]
            Level::Avx512Vnni => avx512::enter_vnni(kernel),
        }
    }
}

/// Code generic over the vector unit. Mark `run` `#[inline(always)]`, so that it is compiled under the features.
pub trait Kernel {
    /// What the kernel returns.
    type Output;

    /// The body.
    ///
    /// # Safety
    /// The caller runs under `S`'s CPU features.
    unsafe fn run<S: Simd>(self) -> Self::Output;
}

#[cfg(test)]
mod tests;
