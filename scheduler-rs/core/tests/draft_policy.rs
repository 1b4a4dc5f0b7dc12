//! Draft lengths against a machine whose acceptance and costs are known.

use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use sonar_scheduler::sim::SplitMix;
use sonar_scheduler::{CostError, CostPoint, DraftPolicy};

const MOST: u32 = 6;

/// Acceptance by position and what a step costs: rows decode together, all with as many drafts as are asked for.
#[derive(Clone, Debug)]
struct Machine {
    rows: u32,
    conditional: Vec<f64>,
    fixed: f64,
    a_token: f64,
    a_draft: f64,
    /// Share of the time by which a step may be longer or shorter.
    noise: f64,
    /// Mean number of steps between changes of its speed, by up to a half; 0: it keeps it.
    steady: u64,
    speed: f64,
    random: SplitMix,
}

impl Machine {
    fn new(rows: u32, rate: f64, a_token: f64, a_draft: f64) -> Self {
        Self {
            rows,
            conditional: vec![rate; MOST as usize],
            fixed: 1.0,
            a_token,
            a_draft,
            noise: 0.04,
            steady: 0,
            speed: 1.0,
            random: SplitMix::new(3),
        }
    }

    fn uniform(&mut self) -> f64 {
        self.random.below(1 << 24) as f64 / f64::from(1 << 24)
    }

    fn seconds(&self, rows: u32, length: u32) -> f64 {
        let tokens = f64::from(rows * (length + 1));
        self.fixed + self.a_token * tokens + self.a_draft * f64::from(length)
    }

    fn points(&self) -> Vec<CostPoint> {
        let shapes = [1, 8, 64]
            .into_iter()
            .flat_map(|rows| [0, 1, 2, MOST].map(|length| (rows, length)));
        shapes
            .map(|(num_rows, num_drafts)| CostPoint {
                num_rows,
                num_drafts,
                seconds: self.seconds(num_rows, num_drafts),
            })
            .collect()
    }

    fn policy(&self) -> DraftPolicy {
        DraftPolicy::new(&self.points(), 64, MOST).expect("two lengths and more")
    }

    /// Tokens a second at one length, in the mean.
    fn rate(&self, length: u32) -> f64 {
        let (mut tokens, mut all) = (1.0, 1.0);
        for conditional in &self.conditional[..length as usize] {
            all *= conditional;
            tokens += all;
        }
        f64::from(self.rows) * tokens / self.seconds(self.rows, length)
    }

    fn best(&self) -> u32 {
        (0..=MOST)
            .max_by(|&a, &b| self.rate(a).total_cmp(&self.rate(b)))
            .expect("some")
    }

    /// Runs steps with the lengths of a policy. Returns them, and tokens a second in the mean of these lengths.
    fn run(&mut self, policy: &mut DraftPolicy, num_steps: usize) -> (Vec<u32>, f64) {
        let (mut lengths, mut tokens, mut time) = (Vec::new(), 0.0, 0.0);
        for _ in 0..num_steps {
            let length = policy.choose(self.rows, &[self.rows; MOST as usize]);
            policy.planned(self.rows, length, length * self.rows);
            for _ in 0..self.rows {
                let mut accepted = 0;
                while accepted < length && self.uniform() < self.conditional[accepted as usize] {
                    accepted += 1;
                }
                policy.add_row(length, accepted);
            }
            let seconds = self.seconds(self.rows, length);
            if self.steady > 0 && self.random.below(self.steady) == 0 {
                self.speed = 1.0 + 0.5 * self.uniform();
            }
            let shaken = self.speed * seconds * (1.0 + self.noise * (2.0 * self.uniform() - 1.0));
            policy.ended(Some(shaken as f32));
            lengths.push(length);
            tokens += self.rate(length) * seconds;
            time += seconds;
        }
        (lengths, tokens / time)
    }
}

fn changes(lengths: &[u32]) -> usize {
    lengths.windows(2).filter(|pair| pair[0] != pair[1]).count()
}

#[test]
fn the_rate_is_close_to_the_best_fixed_length_and_the_length_is_steady() {
    let mut random = SplitMix::new(11);
    let mut uniform = || random.below(1 << 24) as f64 / f64::from(1 << 24);
    let (mut shares, mut most_changes, mut most_own) = (Vec::new(), 0, 0);
    for seed in 0..300 {
        let rows = [1, 5, 8, 32, 64][seed as usize % 5];
        let mut machine = Machine::new(rows, 0.0, 0.1 * uniform(), 0.3 * uniform());
        machine.conditional.fill_with(|| 0.98 * uniform());
        machine.random = SplitMix::new(seed);
        let mut policy = machine.policy();
        machine.run(&mut policy, 500);
        let (mut lengths, mut own) = (Vec::new(), Vec::new());
        let (mut rate, mut time) = (0.0, 0.0);
        for _ in 0..2000 {
            let (length, reached) = machine.run(&mut policy, 1);
            let seconds = machine.seconds(rows, length[0]);
            (rate, time) = (rate + reached * seconds, time + seconds);
            lengths.extend(length);
            own.push(policy.length());
        }
        let share = rate / time / machine.rate(machine.best());
        shares.push(share);
        most_changes = most_changes.max(changes(&lengths));
        most_own = most_own.max(changes(&own));
    }
    let mean = shares.iter().sum::<f64>() / shares.len() as f64;
    let worst = shares.iter().copied().fold(f64::MAX, f64::min);
    assert!(mean >= 0.995 && worst >= 0.975, "{mean}, {worst}");
    // Two changes a probe, one probe in 16 steps at most, and those of the length in use.
    assert!(most_changes <= 2 * 2000 / 16 + 60, "{most_changes}");
    assert!(most_own <= 40, "{most_own}");
}

proptest! {
    // A bound on what noise may lose holds for nearly all seeds, so the seeds are always the same.
    #![proptest_config(ProptestConfig { cases: 64, rng_seed: RngSeed::Fixed(5), ..ProptestConfig::default() })]

    #[test]
    fn costs_that_were_measured_wrong_are_corrected(
        rows in prop::sample::select(vec![1u32, 8, 64]),
        rate in 0.2f64..0.95,
        a_token in 0.002f64..0.05,
        factor in prop::sample::select(vec![0.5f64, 0.75, 1.5, 2.0]),
    ) {
        let mut machine = Machine::new(rows, rate, a_token, 0.02);
        let measured = Machine { a_token: a_token * factor, ..machine.clone() };
        let mut policy = measured.policy();
        machine.run(&mut policy, 4000);
        let (_, reached) = machine.run(&mut policy, 2000);
        prop_assert!(reached >= 0.95 * machine.rate(machine.best()), "{reached} against {}", machine.rate(machine.best()));
    }
}

#[test]
fn costs_that_were_measured_some_percent_wrong_lose_little() {
    // Where drafts are nearly free and where each costs half a step without them, each cost wrong by up to 9 %.
    for (rows, rate, a_token) in [
        (1, 0.8, 0.02),
        (1, 0.4, 0.03),
        (8, 0.8, 0.07),
        (8, 0.3, 0.07),
    ] {
        let reached = (0..60).map(|seed| {
            let mut machine = Machine::new(rows, rate, a_token, 0.0);
            (machine.noise, machine.random) = (0.1, SplitMix::new(seed));
            let mut points = machine.points();
            for point in &mut points {
                point.seconds *= 1.0 + 0.09 * (2.0 * machine.uniform() - 1.0);
            }
            let mut policy = DraftPolicy::new(&points, 64, MOST).expect("two lengths and more");
            machine.run(&mut policy, 300);
            machine.run(&mut policy, 800).1 / machine.rate(machine.best())
        });
        let reached: Vec<f64> = reached.collect();
        let mean = reached.iter().sum::<f64>() / reached.len() as f64;
        assert!(mean >= 0.99, "{mean} with {rows} rows, {rate}, {a_token}");
    }
}

#[test]
fn a_machine_of_changing_speed_loses_little() {
    for (a_token, rate) in [(0.05, 0.8), (0.02, 0.6), (0.1, 0.8)] {
        let reached = (0..40).map(|seed| {
            let mut machine = Machine::new(8, rate, a_token, 0.02);
            (machine.steady, machine.noise) = (12, 0.1);
            machine.random = SplitMix::new(seed);
            let mut policy = machine.policy();
            machine.run(&mut policy, 60);
            machine.run(&mut policy, 400).1 / machine.rate(machine.best())
        });
        let reached: Vec<f64> = reached.collect();
        let mean = reached.iter().sum::<f64>() / reached.len() as f64;
        let worst = reached.iter().copied().fold(f64::MAX, f64::min);
        assert!(mean >= 0.985 && worst >= 0.95, "{mean}, {worst}");
    }
}

#[test]
fn a_length_that_met_a_slow_time_is_soon_forgiven() {
    // In slow times drafts do not pay; in fast ones two of them give 14 % more than the nearest other length.
    let mut machine = Machine::new(8, 0.8, 0.0, 0.0);
    let mut policy = Machine {
        fixed: 0.5,
        a_token: 0.06,
        ..machine.clone()
    }
    .policy();
    let (mut reached, mut best) = (0.0, 0.0);
    for step in 0..2400 {
        (machine.fixed, machine.a_token) = if step / 100 % 2 == 1 {
            (0.3, 0.14)
        } else {
            (0.5, 0.06)
        };
        reached += machine.run(&mut policy, 1).1;
        best += machine.rate(machine.best());
    }
    assert!(reached >= 0.97 * best, "{reached} against {best}");
}

#[test]
fn a_machine_that_slows_down_in_every_step_changes_no_choice() {
    let mut machine = Machine::new(8, 0.9, 0.02, 0.05);
    machine.conditional[2..].fill(0.3);
    let mut policy = machine.policy();
    machine.run(&mut policy, 500);
    let length = policy.length();
    assert_eq!(length, 2);
    for factor in [1.5, 0.5, 3.0] {
        machine.fixed *= factor;
        machine.a_token *= factor;
        machine.a_draft *= factor;
        for _ in 0..500 {
            machine.run(&mut policy, 1);
            assert_eq!(policy.length(), length);
        }
    }
}

#[test]
fn drafting_stops_where_it_does_not_pay_and_starts_again_when_it_does() {
    let mut machine = Machine::new(4, 0.9, 0.05, 0.05);
    let mut policy = machine.policy();
    machine.run(&mut policy, 300);
    assert!(policy.length() >= 2);
    machine.conditional.fill(0.02);
    machine.run(&mut policy, 300);
    assert_eq!(policy.length(), 0);
    let (lengths, _) = machine.run(&mut policy, 2000);
    let num_probing = lengths.iter().filter(|&&length| length > 0).count();
    assert!((1..=80).contains(&num_probing), "{num_probing}");
    machine.conditional.fill(0.9);
    machine.run(&mut policy, 600);
    assert!(policy.length() >= 2, "{}", policy.length());
}

#[test]
fn a_gain_within_the_noise_does_not_flap() {
    // Lengths 2 to 4 differ by less than a percent.
    let mut machine = Machine::new(1, 0.75, 0.22, 0.0);
    machine.conditional = vec![0.75, 0.6, 0.47, 0.35, 0.2, 0.1];
    let mut policy = machine.policy();
    machine.run(&mut policy, 500);
    let mut own_changes = 0;
    for _ in 0..3000 {
        let before = policy.length();
        machine.run(&mut policy, 1);
        own_changes += usize::from(policy.length() != before);
    }
    assert!(own_changes <= 30, "{own_changes}");
}

#[test]
fn crossing_a_number_of_rows_back_and_forth_keeps_the_rate() {
    let mut machine = Machine::new(31, 0.6, 0.02, 0.02);
    let mut policy = machine.policy();
    let (mut reached, mut best) = (0.0, 0.0);
    for _ in 0..100 {
        for rows in [31, 33] {
            machine.rows = rows;
            reached += machine.run(&mut policy, 10).1;
            best += machine.rate(machine.best());
        }
    }
    assert!(reached >= 0.95 * best, "{reached} against {best}");
}

#[test]
fn rows_without_drafts_leave_the_length_alone() {
    let machine = Machine::new(2, 0.9, 0.01, 0.0);
    let mut policy = machine.policy();
    let length = policy.choose(2, &[2; MOST as usize]);
    for _ in 0..100 {
        assert_eq!(policy.choose(2, &[0; MOST as usize]), length);
    }
}

#[test]
fn few_rows_with_drafts_among_many_draft_where_all_would_not() {
    let machine = Machine::new(64, 0.6, 0.5, 0.0);
    let mut policy = machine.policy();
    assert_eq!(policy.choose(64, &[64; MOST as usize]), 0);
    let machine = Machine {
        fixed: 200.0,
        ..machine
    };
    let mut policy = machine.policy();
    assert!(policy.choose(64, &[2; MOST as usize]) >= policy.choose(64, &[64; MOST as usize]));
}

#[test]
fn measurements_that_make_no_table_are_refused() {
    let point = |num_rows, num_drafts, seconds| CostPoint {
        num_rows,
        num_drafts,
        seconds,
    };
    let new = |points: &[CostPoint]| DraftPolicy::new(points, 4, 3).map(|_| ());
    assert_eq!(new(&[]), Err(CostError::Empty));
    assert_eq!(
        new(&[point(2, 0, 1.0)]),
        Err(CostError::OneLength { num_rows: 2 })
    );
    assert_eq!(
        new(&[point(1, 0, 1.0), point(1, 1, 0.0)]),
        Err(CostError::NoTime {
            num_rows: 1,
            seconds: 0.0
        })
    );
    assert!(new(&[point(1, 0, 1.0), point(1, 2, 1.1)]).is_ok());
}
