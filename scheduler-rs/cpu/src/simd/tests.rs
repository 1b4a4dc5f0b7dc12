use super::*;
use crate::math;

struct Apply {
    inputs: Vec<f32>,
    function: Function,
}

#[derive(Clone, Copy)]
enum Function {
    Exp,
    Ln,
    Bf16,
    F16,
}

impl Kernel for Apply {
    type Output = Vec<f32>;

    #[inline(always)]
    unsafe fn run<S: Simd>(self) -> Vec<f32> {
        let mut out = vec![0.0; self.inputs.len()];
        for at in (0..self.inputs.len()).step_by(LANES) {
            let x = S::load(self.inputs.as_ptr().add(at));
            let mut half = [0u16; LANES];
            let y = match self.function {
                Function::Exp => math::exp::<S>(x),
                Function::Ln => math::ln::<S>(x),
                Function::Bf16 => {
                    S::store_bf16(half.as_mut_ptr(), x);
                    S::load_bf16(half.as_ptr())
                }
                Function::F16 => {
                    S::store_f16(half.as_mut_ptr(), x);
                    S::load_f16(half.as_ptr())
                }
            };
            S::store(out.as_mut_ptr().add(at), y);
        }
        out
    }
}

fn apply(level: Level, function: Function, inputs: &[f32]) -> Vec<f32> {
    // SAFETY: `available` lists only what this CPU has; inputs are whole lanes.
    unsafe {
        level.run(Apply {
            inputs: inputs.to_vec(),
            function,
        })
    }
}

fn bit_patterns(count: usize) -> Vec<f32> {
    let mut state = 1u32;
    let special = [
        0.0,
        -0.0,
        f32::NAN,
        f32::INFINITY,
        f32::NEG_INFINITY,
        65504.0,
        65520.0,
        6e-8,
        3e-8,
        1e-40,
        1e38,
    ];
    let random = std::iter::repeat_with(move || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        f32::from_bits(state)
    });
    special.into_iter().chain(random).take(count).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

#[test]
fn every_level_gives_the_same_bits() {
    let inputs = bit_patterns(1 << 16);
    for function in [Function::Exp, Function::Ln, Function::Bf16, Function::F16] {
        let inputs: Vec<f32> = match function {
            Function::Ln => inputs
                .iter()
                .map(|x| if x.is_normal() { x.abs() } else { 1.0 })
                .collect(),
            _ => inputs.clone(),
        };
        let expected = apply(Level::Scalar, function, &inputs);
        for level in Level::available() {
            let found = apply(level, function, &inputs);
            for (i, (a, b)) in expected.iter().zip(&found).enumerate() {
                let same = a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
                assert!(same, "{level:?}: f({}) is {b}, scalar says {a}", inputs[i]);
            }
        }
    }
}

#[test]
fn exp_is_accurate_and_cuts_off_at_minus_87() {
    let inputs: Vec<f32> = (0..4096)
        .map(|i| -87.0 + i as f32 * (175.0 / 4096.0))
        .collect();
    for (x, y) in inputs
        .iter()
        .zip(apply(Level::detect(), Function::Exp, &inputs))
    {
        let expected = f64::from(*x).exp();
        assert!(
            (f64::from(y) / expected - 1.0).abs() < 3e-7,
            "exp({x}) gave {y}"
        );
    }
    let edges = [f32::NEG_INFINITY, -87.5, 0.0, f32::NAN];
    let found = apply(Level::detect(), Function::Exp, &edges.repeat(4));
    assert_eq!(bits(&found[..3]), bits(&[0.0, 0.0, 1.0]));
    assert!(found[3].is_nan());
}

#[test]
fn ln_is_accurate_also_next_to_one() {
    let near: Vec<f32> = (0..2048)
        .map(|i| f32::from_bits(1f32.to_bits() - 1024 + i))
        .collect();
    let wide: Vec<f32> = (0..4096)
        .map(|i| (f64::from(i - 2048) * 0.04).exp() as f32)
        .collect();
    for inputs in [near, wide] {
        for (x, y) in inputs
            .iter()
            .zip(apply(Level::detect(), Function::Ln, &inputs))
        {
            let expected = f64::from(*x).ln();
            assert!(
                (f64::from(y) - expected).abs() <= 4e-7 * expected.abs(),
                "ln({x}) gave {y}, not {expected}"
            );
        }
    }
}
