//! Every vector level and every thread count gives the same bits, for every kernel.
use sonar_cpu::activation::silu_and_mul;
use sonar_cpu::attention::{Batch, Geometry, LayerCache, Plan, Tensors, Workspace, attend};
use sonar_cpu::dtype::{Dtype, f32_to_bf16, f32_to_f16};
use sonar_cpu::gemm::{self, linear};
use sonar_cpu::matrix::{Matrix, MatrixMut};
use sonar_cpu::norm::{RmsNorm, rms_norm};
use sonar_cpu::panels::PackedWeight;
use sonar_cpu::quant::{Bits, QuantWeight};
use sonar_cpu::quant_gemm::{QuantWorkspace, quant_linear};
use sonar_cpu::rope::{Rope, rope};
use sonar_cpu::sample::{GumbelRows, gumbel_argmax};
use sonar_cpu::simd::Level;
use sonar_cpu::threads::Threads;

const DTYPES: [Dtype; 3] = [Dtype::F32, Dtype::Bf16, Dtype::F16];

/// Numbers in [-2, 2), the same for the same seed.
fn numbers(count: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9) | 1;
    (0..count)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 17;
            state ^= state << 5;
            (state >> 8) as f32 / f32::from(1u16 << 15) / 128.0 - 2.0
        })
        .collect()
}

/// A matrix that owns its bytes.
#[derive(Clone)]
struct Owned {
    bytes: Vec<u8>,
    rows: usize,
    cols: usize,
    dtype: Dtype,
}

impl Owned {
    fn random(rows: usize, cols: usize, dtype: Dtype, seed: u32) -> Owned {
        let values = numbers(rows * cols, seed);
        let bytes = match dtype {
            Dtype::F32 => values
                .iter()
                .flat_map(|value| value.to_le_bytes())
                .collect(),
            Dtype::Bf16 => values
                .iter()
                .flat_map(|value| f32_to_bf16(*value).to_le_bytes())
                .collect(),
            Dtype::F16 => values
                .iter()
                .flat_map(|value| f32_to_f16(*value).to_le_bytes())
                .collect(),
        };
        Owned {
            bytes,
            rows,
            cols,
            dtype,
        }
    }

    /// Sets the elements of an fp32 matrix by their index.
    fn fill(&mut self, value: impl Fn(usize) -> f32) {
        for (at, bytes) in self.bytes.chunks_mut(4).enumerate() {
            bytes.copy_from_slice(&value(at).to_le_bytes());
        }
    }

    fn read(&self) -> Matrix {
        let ptr = self.bytes.as_ptr();
        Matrix {
            ptr,
            stride: self.cols,
            rows: self.rows,
            cols: self.cols,
            dtype: self.dtype,
        }
    }

    fn write(&mut self) -> MatrixMut {
        let ptr = self.bytes.as_mut_ptr();
        MatrixMut {
            ptr,
            stride: self.cols,
            rows: self.rows,
            cols: self.cols,
            dtype: self.dtype,
        }
    }
}

/// Runs `kernel` for each level and thread count; all must return equal bytes.
fn assert_same_everywhere(what: &str, kernel: impl Fn(Level, &Threads) -> Vec<u8>) {
    let expected = kernel(Level::Scalar, &Threads::new(1));
    assert!(
        expected.iter().any(|byte| *byte != 0),
        "{what} wrote nothing"
    );
    for level in Level::available() {
        for count in [1, 3] {
            let found = kernel(level, &Threads::new(count));
            assert!(
                found == expected,
                "{what} differs at {} with {count} threads",
                level.name()
            );
        }
    }
}

#[test]
fn linear_gives_the_same_bits_everywhere() {
    for dtype in DTYPES {
        for rows in [1, 2, 3, 4, 7, 30] {
            let (x, weight) = (
                Owned::random(rows, 37, dtype, 1),
                Owned::random(75, 37, dtype, 2),
            );
            let bias = numbers(75, 3);
            assert_same_everywhere("linear", |level, threads| {
                let mut y = Owned::random(rows, 75, dtype, 4);
                // SAFETY: the matrices own their memory and have the shapes of the contract.
                unsafe {
                    let packed = PackedWeight::pack(weight.read(), Some(&bias));
                    linear(
                        level,
                        threads,
                        &mut gemm::Workspace::default(),
                        x.read(),
                        &packed,
                        y.write(),
                    );
                }
                y.bytes
            });
        }
    }
}

#[test]
fn quantised_linear_gives_the_same_bits_everywhere() {
    for (dtype, bits) in [
        (Dtype::F32, Bits::Four),
        (Dtype::Bf16, Bits::Four),
        (Dtype::F32, Bits::Eight),
        (Dtype::F16, Bits::Eight),
    ] {
        for rows in [1, 2, 3, 4, 7, 100] {
            let (x, weight) = (
                Owned::random(rows, 96, dtype, 1),
                Owned::random(75, 96, dtype, 2),
            );
            let bias = numbers(75, 3);
            assert_same_everywhere("quantised linear", |level, threads| {
                let mut y = Owned::random(rows, 75, dtype, 4);
                // SAFETY: the matrices own their memory and have the shapes of the contract.
                unsafe {
                    let packed = QuantWeight::pack(weight.read(), Some(&bias), bits).unwrap();
                    quant_linear(
                        level,
                        threads,
                        &mut QuantWorkspace::default(),
                        x.read(),
                        &packed,
                        y.write(),
                    );
                }
                y.bytes
            });
        }
    }
}

#[test]
fn the_largest_weights_and_inputs_of_either_sign_do_not_overflow() {
    for bits in [Bits::Four, Bits::Eight] {
        for sign in [1.0f32, -1.0] {
            let mut x = Owned::random(1, 64, Dtype::F32, 1);
            let mut weight = Owned::random(16, 64, Dtype::F32, 2);
            x.fill(|_| sign);
            weight.fill(|at| if at % 64 == 0 { -1.0 } else { 1.0 });
            for level in Level::available() {
                let mut y = Owned::random(1, 16, Dtype::F32, 3);
                // SAFETY: as above.
                unsafe {
                    let packed = QuantWeight::pack(weight.read(), None, bits).unwrap();
                    quant_linear(
                        level,
                        &Threads::new(1),
                        &mut QuantWorkspace::default(),
                        x.read(),
                        &packed,
                        y.write(),
                    );
                }
                for bytes in y.bytes.chunks(4) {
                    let value = f32::from_le_bytes(bytes.try_into().unwrap());
                    assert!(
                        (value - 62.0 * sign).abs() < 0.1,
                        "{value} at {}",
                        level.name()
                    );
                }
            }
        }
    }
}

#[test]
fn a_weight_that_is_not_whole_groups_is_not_quantised() {
    let weight = Owned::random(4, 48, Dtype::F32, 1);
    // SAFETY: as above.
    unsafe {
        assert!(QuantWeight::pack(weight.read(), None, Bits::Four).is_none());
        assert!(QuantWeight::pack(weight.read(), None, Bits::Eight).is_none());
    }
}

#[test]
fn row_wise_kernels_give_the_same_bits_everywhere() {
    for dtype in DTYPES {
        let (x, weight) = (
            Owned::random(9, 80, dtype, 1),
            Owned::random(1, 80, dtype, 2),
        );
        let table = numbers(50 * 40, 3);
        let positions = [3, 0, 49, 7, 7, 1, 2, 30, 11];
        assert_same_everywhere("row-wise kernels", |level, threads| {
            let mut residual = Owned::random(9, 80, dtype, 5);
            let (mut normed, mut gated) = (x.clone(), Owned::random(9, 40, dtype, 6));
            let mut key = Owned::random(9, 40, dtype, 7);
            // SAFETY: as above.
            unsafe {
                let (x, y) = (x.read(), normed.write());
                let norm = RmsNorm {
                    x,
                    residual: Some(residual.write()),
                    weight: weight.bytes.as_ptr(),
                    y,
                    eps: 1e-5,
                };
                rms_norm(level, threads, norm);
                silu_and_mul(level, threads, normed.read(), gated.write());
                let heads = [normed.write(), key.write()];
                let (positions, cos_sin) = (positions.as_ptr(), table.as_ptr());
                rope(
                    level,
                    threads,
                    Rope {
                        heads,
                        head_dim: 40,
                        positions,
                        cos_sin,
                    },
                );
            }
            [residual.bytes, normed.bytes, gated.bytes, key.bytes].concat()
        });
    }
}

#[test]
fn attention_gives_the_same_bits_everywhere() {
    let geometry = Geometry {
        num_q_heads: 6,
        num_kv_heads: 2,
        head_dim: 24,
        page_size: 4,
        window: Some(90),
        scale: 0.2,
    };
    // two rows over 140 cached tokens each: one decodes, one has 11 tokens
    let page_table: Vec<i32> = (0..80).map(|i| (i * 27) % 80).collect();
    let positions: Vec<i32> = std::iter::once(139).chain(129..140).collect();
    let slots = [1, 0];
    let slot_mapping: Vec<i32> = positions
        .iter()
        .enumerate()
        .map(|(token, position)| {
            let row = usize::from(token == 0) * 40;
            page_table[row + *position as usize / 4] * 4 + position % 4
        })
        .collect();
    let batch = Batch {
        qo_indptr: &[0, 1, 12],
        slots: &slots,
        positions: &positions,
        slot_mapping: &slot_mapping,
        page_table: page_table.as_ptr(),
        page_table_stride: 40,
    };
    for dtype in DTYPES {
        let (q, k, v) = (
            Owned::random(12, 144, dtype, 1),
            Owned::random(12, 48, dtype, 2),
            Owned::random(12, 48, dtype, 3),
        );
        assert_same_everywhere("attention", |level, threads| {
            let mut cache = Owned::random(80 * 8, 48, dtype, 4);
            let mut out = Owned::random(12, 144, dtype, 5);
            let mut plan = Plan::default();
            plan.rebuild(&geometry, &batch);
            let tensors = Tensors {
                q: q.read(),
                k: k.read(),
                v: v.read(),
                out: out.write(),
                cache: LayerCache {
                    ptr: cache.bytes.as_mut_ptr(),
                    dtype,
                },
            };
            let workspace = Workspace::new(threads.count());
            // SAFETY: as above; the page table holds pages of the cache.
            unsafe {
                attend(
                    level, threads, &workspace, &geometry, &plan, &batch, &tensors,
                )
            };
            [cache.bytes, out.bytes].concat()
        });
    }
}

#[test]
fn sampling_gives_the_same_tokens_everywhere() {
    let logits = numbers(6 * 9001, 1);
    let words: Vec<u32> = (1..=6u32).map(|i| i.wrapping_mul(0x5851_f42d)).collect();
    let rows = GumbelRows {
        logits: logits.as_ptr(),
        stride: 9001,
        vocab: 9001,
        inv_temperature: &[0.0, 0.1, 0.5, 1.0, 2.0, 10.0],
        seed_lo: &words,
        seed_hi: &words,
        counter: &words,
    };
    assert_same_everywhere("sampling", |level, threads| {
        let mut tokens = [0; 6];
        // SAFETY: as above.
        unsafe { gumbel_argmax(level, threads, &rows, &mut tokens) };
        tokens
            .iter()
            .flat_map(|token| token.to_le_bytes())
            .collect()
    });
}
