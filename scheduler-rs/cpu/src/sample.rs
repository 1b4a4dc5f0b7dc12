//! Sampling a token per row in one pass over the logits.
use std::sync::Mutex;

use crate::dtype::{load_partial, store_partial};
use crate::math::ln;
use crate::simd::{Kernel, LANES, Level, Simd};
use crate::threads::Threads;

/// Columns of one task.
const SPAN: usize = 8192;

/// Rows of logits and how each is sampled. S rows, V columns.
#[derive(Clone, Copy, Debug)]
pub struct GumbelRows<'a> {
    /// fp32 `[S, stride]`.
    pub logits: *const f32,
    /// Elements between rows.
    pub stride: usize,
    /// V.
    pub vocab: usize,
    /// 1 / temperature a row; 0 takes the greatest logit.
    pub inv_temperature: &'a [f32],
    /// Low words of the rows' seeds.
    pub seed_lo: &'a [u32],
    /// High words of the rows' seeds.
    pub seed_hi: &'a [u32],
    /// Output position of each row.
    pub counter: &'a [u32],
}

// SAFETY: read-only.
unsafe impl Sync for GumbelRows<'_> {}

/// The best column so far; an empty span has none.
#[derive(Clone, Copy, Debug)]
struct Best {
    score: f32,
    id: u32,
}

const NONE: Best = Best {
    score: f32::NEG_INFINITY,
    id: u32::MAX,
};

/// For each row the column with the greatest `logit / T - ln E`, E exponential noise from [`coin_bits`]; the lowest
/// column among equals. With T = 0 the noise is left out. A row without any score above -inf gives column 0.
///
/// The noise is `E = -ln(1 - u)`, `u = (h + 1/2) 2^-32` in fp32; its relative error is below 1e-6.
///
/// # Safety
/// Logits are readable, `out` has one element per row, the CPU has `level`.
pub unsafe fn gumbel_argmax(
    level: Level,
    threads: &Threads,
    rows: &GumbelRows<'_>,
    out: &mut [i32],
) {
    let spans = rows.vocab.div_ceil(SPAN);
    let found: Vec<Mutex<Best>> = (0..out.len() * spans).map(|_| Mutex::new(NONE)).collect();
    threads.run(found.len(), &|_, task| {
        let (row, span) = (task / spans, task % spans);
        let best = level.run(SpanTask {
            rows,
            row,
            first: span * SPAN,
            end: rows.vocab.min((span + 1) * SPAN),
        });
        if let Ok(mut slot) = found[task].lock() {
            *slot = best;
        }
    });
    for (row, target) in out.iter_mut().enumerate() {
        let spans_of_row = found[row * spans..(row + 1) * spans].iter();
        let best = spans_of_row
            .filter_map(|slot| slot.lock().ok().map(|best| *best))
            .fold(NONE, better);
        *target = if best.id == u32::MAX {
            0
        } else {
            best.id as i32
        };
    }
}

/// The greater score, the earlier one among equals.
fn better(a: Best, b: Best) -> Best {
    if b.score > a.score { b } else { a }
}

/// The 32 random bits of a vocabulary entry: a counter-based hash of (id, seed, position).
pub fn coin_bits(id: u32, seed_lo: u32, seed_hi: u32, position: u32) -> u32 {
    let h = mix(id.wrapping_mul(0x9e37_79b9).wrapping_add(seed_lo)) ^ seed_hi;
    mix(mix(h).wrapping_add(position.wrapping_mul(0x85eb_ca6b)))
}

fn mix(mut x: u32) -> u32 {
    x ^= x >> 16;
    x = x.wrapping_mul(0x7feb_352d);
    x ^= x >> 15;
    x = x.wrapping_mul(0x846c_a68b);
    x ^ (x >> 16)
}

struct SpanTask<'a> {
    rows: &'a GumbelRows<'a>,
    row: usize,
    first: usize,
    end: usize,
}

impl Kernel for SpanTask<'_> {
    type Output = Best;

    #[inline(always)]
    unsafe fn run<S: Simd>(self) -> Best {
        let logits = self.rows.logits.add(self.row * self.rows.stride);
        let inverse = self.rows.inv_temperature[self.row];
        let mut best = NONE;
        let mut scores = [0.0f32; LANES];
        let mut best_lanes = S::splat(f32::NEG_INFINITY);
        for column in (self.first..self.end).step_by(LANES) {
            let count = (self.end - column).min(LANES);
            let mut score = load_partial::<S, f32>(logits.add(column), count);
            if inverse != 0.0 {
                score = S::sub(
                    S::mul(score, S::splat(inverse)),
                    log_noise::<S>(&self, column as u32),
                );
            }
            // a lane above every earlier lane's best is rare: look closer only then
            let raised = S::max(score, best_lanes);
            store_partial::<S, f32>(scores.as_mut_ptr(), score, LANES);
            if S::max_lane(raised) > best.score {
                for (lane, value) in scores.iter().enumerate().take(count) {
                    best = better(
                        best,
                        Best {
                            score: *value,
                            id: (column + lane) as u32,
                        },
                    );
                }
                best_lanes = S::splat(best.score);
            }
        }
        best
    }
}

/// `ln E` of the columns column..column + 16.
#[inline(always)]
unsafe fn log_noise<S: Simd>(task: &SpanTask<'_>, column: u32) -> S::F {
    let h = coins::<S>(task, column);
    // both halves convert exactly; their sum rounds once, as a direct conversion would
    let high = S::i32_to_f32(S::shr_u::<16>(h));
    let low = S::i32_to_f32(S::and_u(h, S::splat_u(0xffff)));
    let value = S::fma(high, S::splat(65536.0), low);
    let u = S::mul(S::add(value, S::splat(0.5)), S::splat(2.328_306_4e-10));
    // ln(1 - u) = ln w + (1 - u - w) / w with w = 1 - u rounded
    let w = S::sub(S::splat(1.0), u);
    let lost = S::sub(S::sub(S::splat(1.0), w), u);
    let one = S::splat(1.0);
    let safe = S::select_lt(S::splat(0.0), w, w, one);
    let log = S::add(ln::<S>(safe), S::div(lost, safe));
    let noise = S::sub(S::splat(0.0), log);
    // u = 1: E is infinite, and so is its logarithm
    S::select_lt(S::splat(0.0), w, ln::<S>(noise), S::splat(f32::INFINITY))
}

#[inline(always)]
unsafe fn coins<S: Simd>(task: &SpanTask<'_>, column: u32) -> S::U {
    let (lo, hi) = (task.rows.seed_lo[task.row], task.rows.seed_hi[task.row]);
    let position = task.rows.counter[task.row].wrapping_mul(0x85eb_ca6b);
    let ids: [u32; LANES] = std::array::from_fn(|lane| column.wrapping_add(lane as u32));
    let h = S::add_u(
        S::mul_u(S::load_u(ids.as_ptr()), S::splat_u(0x9e37_79b9)),
        S::splat_u(lo),
    );
    let h = S::xor_u(mix_lanes::<S>(h), S::splat_u(hi));
    let h = S::add_u(mix_lanes::<S>(h), S::splat_u(position));
    mix_lanes::<S>(h)
}

#[inline(always)]
unsafe fn mix_lanes<S: Simd>(x: S::U) -> S::U {
    let x = S::mul_u(S::xor_u(x, S::shr_u::<16>(x)), S::splat_u(0x7feb_352d));
    let x = S::mul_u(S::xor_u(x, S::shr_u::<15>(x)), S::splat_u(0x846c_a68b));
    S::xor_u(x, S::shr_u::<16>(x))
}
