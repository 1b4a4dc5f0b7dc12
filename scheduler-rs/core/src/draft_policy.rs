//! How many tokens to draft: the length that gives most tokens a second, by acceptance and by measured cost.
//!
//! With a_j the probability that draft j is accepted where j - 1 was, A_j = a_1 * .. * a_j and W_j the rows that have
//! a j-th draft, a step of B rows gives B + W_1 A_1 + .. + W_K A_K tokens and takes as long as [`costs`] say. Length 0 is
//! one of the choices. There is no clock here: the caller brings the seconds of each step.
//!
//! What keeps it steady: a change must promise 3 %, or 1 % for many steps; costs that it compares are free of what slows
//! all steps down. What keeps it awake: now and then it probes another length, within a budget of time lost.

mod acceptance;
mod costs;

pub use costs::{CostError, CostPoint};

use acceptance::Acceptance;
use costs::StepCosts;

/// Predicted gain of a change that is made at once.
const CLEAR_GAIN: f32 = 1.03;
/// Predicted gain of a change that is made when it stays for `PATIENCE` steps.
const SLIGHT_GAIN: f32 = 1.01;
const PATIENCE: u32 = 32;
/// Share of the time that probing may lose, by [`Direction`]. What loses little is probed often.
const PROBING_SHARES: [f32; 3] = [0.0015, 0.0015, 0.0005];
/// Least steps between two probes, unless the last one was a pleasant surprise.
const PROBING_INTERVAL: u32 = 16;
/// Steps of a probe. The first one's time is not like that of others: a drafter may have to catch up.
const PROBE_LEN: u32 = 3;
/// Lengths with a larger share of the steps need no probe.
const WELL_KNOWN: f32 = 0.02;

/// The step between its plan and its end.
#[derive(Clone, Copy, Debug)]
struct Shape {
    num_rows: u32,
    /// The length that was chosen.
    length: u32,
    /// Drafts of a row that were granted.
    drafts: f32,
}

/// What a probe may try: one draft more, one less, none. Acceptance and cost of the first are seen in no other way, and
/// a length that pays more by now shows by its cost.
#[derive(Clone, Copy, Debug)]
enum Direction {
    Deeper,
    Shallower,
    Without,
}

#[derive(Clone, Copy, Debug)]
struct Probe {
    direction: Direction,
    length: u32,
    num_left: u32,
    /// What was thought of the last position's acceptance before it.
    believed: f32,
}

/// Chooses a draft length for each step of decode rows.
#[derive(Clone, Debug)]
pub struct DraftPolicy {
    most: u32,
    acceptance: Acceptance,
    costs: StepCosts,
    /// The length in use, probes apart.
    length: u32,
    num_better: u32,
    probe: Option<Probe>,
    since_probe: u32,
    num_probes: u32,
    /// Seconds that probing may lose now, by [`Direction`].
    credits: [f32; 3],
    in_flight: Option<Shape>,
    last: Option<Shape>,
    // Of the present step, by length, [most + 1]: tokens, drafts of a row, seconds.
    tokens: Vec<f32>,
    drafts: Vec<f32>,
    seconds: Vec<f32>,
}

impl DraftPolicy {
    /// A policy for up to `max_rows` rows and `most` drafts, that knows the costs at `points`.
    ///
    /// # Errors
    /// See [`CostError`].
    pub fn new(points: &[CostPoint], max_rows: u32, most: u32) -> Result<Self, CostError> {
        Ok(Self {
            most,
            acceptance: Acceptance::new(most as usize),
            costs: StepCosts::new(points, max_rows, most)?,
            length: most,
            num_better: PATIENCE,
            probe: None,
            since_probe: 0,
            num_probes: 0,
            credits: [0.0; 3],
            in_flight: None,
            last: None,
            tokens: Vec::new(),
            drafts: Vec::new(),
            seconds: Vec::new(),
        })
    }

    /// The length in use, probes apart.
    pub fn length(&self) -> u32 {
        self.length
    }

    /// The length of the coming step of `num_rows` decode rows. `wanted[j]` is the number of rows that can have more
    /// than j drafts.
    pub fn choose(&mut self, num_rows: u32, wanted: &[u32]) -> u32 {
        let can_draft = wanted.first().is_some_and(|&num| num > 0);
        if num_rows == 0 || !can_draft {
            return self.length;
        }
        self.predict(num_rows, wanted);
        self.improve();
        self.save_for_probes();
        if self.probe.is_none() && self.since_probe >= PROBING_INTERVAL {
            self.start_probe(num_rows);
        }
        match &mut self.probe {
            Some(probe) => {
                probe.num_left = probe.num_left.saturating_sub(1);
                let (direction, length) = (probe.direction, probe.length);
                self.credits[direction as usize] -= self.loss(length);
                length
            }
            None => self.length,
        }
    }

    /// The step that [`Self::choose`] was asked for has been planned with so many drafts.
    pub fn planned(&mut self, num_rows: u32, length: u32, num_drafts: u32) {
        self.in_flight = Some(Shape {
            num_rows,
            length,
            drafts: num_drafts as f32 / num_rows as f32,
        });
    }

    /// The step in flight is not to be learnt from: it did not run, or is none of decode rows alone.
    pub fn skip(&mut self) {
        self.in_flight = None;
        self.last = None;
    }

    /// A verified row of the step in flight.
    #[inline]
    pub fn add_row(&mut self, num_drafts: u32, num_accepted: u32) {
        self.acceptance.add(num_drafts, num_accepted);
    }

    /// The step in flight has ended; `seconds` is what it took, if that is known.
    pub fn ended(&mut self, seconds: Option<f32>) {
        self.acceptance.settle();
        let Some(shape) = self.in_flight.take() else {
            return;
        };
        let is_like_last = self
            .last
            .is_some_and(|last| last.length == shape.length && last.num_rows == shape.num_rows);
        if let Some(seconds) = seconds.filter(|&seconds| seconds > 0.0) {
            self.time(shape, seconds, is_like_last);
        }
        self.last = Some(shape);
        self.end_probe();
    }

    fn time(&mut self, shape: Shape, seconds: f32, is_like_last: bool) {
        if is_like_last {
            self.costs.observe(shape.num_rows, shape.drafts, seconds);
        } else if let Some(probe) = self.probe {
            // Catching up is part of what a probe costs.
            let expected = self.costs.expected(shape.num_rows, shape.drafts);
            self.credits[probe.direction as usize] -= (seconds - expected).max(0.0);
        }
    }

    /// Tokens and seconds of a step at each length.
    fn predict(&mut self, num_rows: u32, wanted: &[u32]) {
        let rows = num_rows as f32;
        self.tokens.clear();
        self.drafts.clear();
        self.tokens.push(rows);
        self.drafts.push(0.0);
        let (mut tokens, mut drafts, mut all_accepted) = (rows, 0.0, 1.0);
        for (j, conditional) in self.acceptance.conditional().enumerate() {
            let num = wanted.get(j).map_or(0.0, |&num| num as f32);
            all_accepted *= conditional;
            tokens += num * all_accepted;
            drafts += num / rows;
            self.tokens.push(tokens);
            self.drafts.push(drafts);
        }
        self.costs
            .seconds(num_rows, &self.drafts, &mut self.seconds);
    }

    fn rate(&self, length: u32) -> f32 {
        self.tokens[length as usize] / self.seconds[length as usize]
    }

    /// Goes over to the best length if that is clearly better, or has been slightly better for long.
    fn improve(&mut self) {
        let best = (1..=self.most).fold(0, |best, length| {
            if self.rate(length) > self.rate(best) {
                length
            } else {
                best
            }
        });
        let gain = self.rate(best) / self.rate(self.length);
        if gain <= SLIGHT_GAIN {
            self.num_better = 0;
            return;
        }
        self.num_better += 1;
        if gain > CLEAR_GAIN || self.num_better > PATIENCE {
            self.length = best;
            self.num_better = 0;
        }
    }

    /// Saves time for probing: a share of this step's, up to what any probe may lose.
    fn save_for_probes(&mut self) {
        let most = PROBE_LEN as f32 * self.seconds.iter().copied().fold(0.0, f32::max);
        let seconds = self.seconds[self.length as usize];
        for (credit, share) in self.credits.iter_mut().zip(PROBING_SHARES) {
            *credit = (*credit + share * seconds).min(most);
        }
        self.since_probe += 1;
    }

    /// Seconds that a step of another length is expected to lose.
    fn loss(&self, length: u32) -> f32 {
        let at = length as usize;
        (self.seconds[at] - self.tokens[at] / self.rate(self.length)).max(0.0)
    }

    /// The length of a probe, if there is one that is not known anyway.
    fn length_to_probe(&self, direction: Direction, num_rows: u32) -> Option<u32> {
        let length = match direction {
            Direction::Deeper => self.length + 1,
            Direction::Shallower => self.length.saturating_sub(1),
            Direction::Without => 0,
        };
        let is_deeper = length > self.length;
        let is_known = || self.costs.share(num_rows, length) > WELL_KNOWN;
        let is_open = length <= self.most && length != self.length && (is_deeper || !is_known());
        is_open.then_some(length)
    }

    /// In turn in each direction that the time lost so far allows.
    fn start_probe(&mut self, num_rows: u32) {
        const DIRECTIONS: [Direction; 3] =
            [Direction::Deeper, Direction::Shallower, Direction::Without];
        let first = self.num_probes as usize % DIRECTIONS.len();
        let (before, after) = DIRECTIONS.split_at(first);
        let affordable = after.iter().chain(before).find_map(|&direction| {
            let length = self.length_to_probe(direction, num_rows)?;
            let loss = PROBE_LEN as f32 * self.loss(length);
            (loss <= self.credits[direction as usize]).then_some((direction, length))
        });
        let Some((direction, length)) = affordable else {
            return;
        };
        self.num_probes += 1;
        self.since_probe = 0;
        self.probe = Some(Probe {
            direction,
            length,
            num_left: PROBE_LEN,
            believed: self.believed(length),
        });
    }

    /// After its last step. A probe of a deeper length that did better than was thought is soon followed by another.
    fn end_probe(&mut self) {
        let Some(probe) = self.probe.take_if(|probe| probe.num_left == 0) else {
            return;
        };
        if probe.length > self.length && self.believed(probe.length) > probe.believed {
            self.since_probe = PROBING_INTERVAL;
        }
    }

    /// The acceptance at a length's last position.
    fn believed(&self, length: u32) -> f32 {
        let position = (length as usize).saturating_sub(1);
        self.acceptance.conditional().nth(position).unwrap_or(0.0)
    }
}
