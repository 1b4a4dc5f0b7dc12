//! What a step costs, by its rows and the drafts of a row: measured at the start, corrected by the steps that ran.
//!
//! A cost is one number for the whole step, T_verify(B, K + 1) + K T_draft(B) + T_ingest(B, K) and the host's part:
//! only the sum is ever compared. Its corrections are *contrasts*. Most steps have one draft length; they say how slow
//! the machine is now (the level, which no choice depends on), and the others are compared with them. So whatever
//! slows every step down, a longer context or a busy machine, changes no choice, and neither does noise in most steps.

use thiserror::Error;

/// Share of a surprise that moves the level, once it is known.
const LEVEL_RATE: f32 = 0.125;
/// Steps over which a cell's share of the steps is averaged.
const SHARE_STEPS: f32 = 32.0;
/// A cell with a larger share speaks of the level alone, one with the rest of it or less of its own cost alone.
const DOMINANT: f32 = 0.9;
/// While the level itself is surprised by more, nothing is compared with it.
const MOST_DRIFT: f32 = 0.1;
const DRIFT_RATE: f32 = 0.25;
/// Variance of the costs measured at the start, as logarithms: a correction that is not seen tends back to none.
const START_VARIANCE: f32 = 0.07 * 0.07;
/// Steps over which it does.
const FADING_STEPS: f32 = 512.0;
/// Variance of a step's time.
const STEP_VARIANCE: f32 = 0.08 * 0.08;
/// Largest believable surprise, as a logarithm.
const MOST_SURPRISE: f32 = 0.5;

/// A measured step: seconds of one with so many decode rows, each with so many drafts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CostPoint {
    /// Decode rows, at least 1.
    pub num_rows: u32,
    /// Drafts of each row.
    pub num_drafts: u32,
    /// The whole step.
    pub seconds: f64,
}

/// Measurements that make no cost table.
#[derive(Clone, Debug, PartialEq, Error)]
#[allow(missing_docs)] // the fields are the numbers of the message
pub enum CostError {
    #[error("no step was measured; measure at least two draft lengths")]
    Empty,
    #[error(
        "a step of {num_rows} rows took {seconds} s; it must have rows and take a positive time"
    )]
    NoTime { num_rows: u32, seconds: f64 },
    #[error("steps of {num_rows} rows were measured with one draft length; measure at least two")]
    OneLength { num_rows: u32 },
}

#[derive(Clone, Copy, Debug, Default)]
struct Cell {
    /// Seconds as measured at the start, or between such measurements.
    base: f32,
    /// Its correction, as a logarithm, and how far that may be wrong.
    correction: f32,
    variance: f32,
    /// What the last two steps said that `base` is wrong by, as logarithms, if it had as many.
    last: [f32; 2],
    num_seen: u32,
    /// Of the lately observed steps with about as many rows, those of this cell.
    share: f32,
}

/// Cells of about 2^b rows.
#[derive(Clone, Debug)]
struct Bin {
    /// `[most + 1]`, by drafts of a row.
    cells: Vec<Cell>,
    /// How much slower than its cells say a step is now, as a logarithm.
    level: f32,
    /// The level's own surprises, lately.
    drift: f32,
    num_seen: u32,
}

/// The table.
#[derive(Clone, Debug)]
pub(crate) struct StepCosts {
    bins: Vec<Bin>,
}

/// The place of a number of rows in the table.
#[derive(Clone, Copy, Debug)]
struct Place {
    bin: usize,
    /// Of the next bin.
    weight: f32,
}

impl StepCosts {
    /// A table for up to `max_rows` rows with up to `most` drafts each.
    ///
    /// # Errors
    /// A time that is none, or fewer than two draft lengths at a number of rows.
    pub(crate) fn new(points: &[CostPoint], max_rows: u32, most: u32) -> Result<Self, CostError> {
        let curves = curves(points)?;
        let num_bins = max_rows.max(2).next_power_of_two().trailing_zeros() + 1;
        let bin = |b: u32| Bin {
            cells: (0..=most)
                .map(|drafts| Cell {
                    base: between_curves(&curves, (1u32 << b) as f32, drafts as f32),
                    variance: START_VARIANCE,
                    ..Cell::default()
                })
                .collect(),
            level: 0.0,
            drift: 0.0,
            num_seen: 0,
        };
        Ok(Self {
            bins: (0..num_bins).map(bin).collect(),
        })
    }

    /// Writes the seconds of a step for each of `drafts`, given in drafts of a row.
    pub(crate) fn seconds(&self, num_rows: u32, drafts: &[f32], out: &mut Vec<f32>) {
        let place = self.place(num_rows);
        out.clear();
        out.extend(drafts.iter().map(|&drafts| self.at(place, drafts)));
    }

    /// Seconds of a step with so many drafts a row, on the machine as it is now.
    pub(crate) fn expected(&self, num_rows: u32, drafts: f32) -> f32 {
        let level = self.bins[self.nearest_bin(num_rows)].level;
        self.at(self.place(num_rows), drafts) * level.exp()
    }

    /// Takes in the time of a step with so many drafts a row.
    pub(crate) fn observe(&mut self, num_rows: u32, drafts: f32, seconds: f32) {
        let expected = self.at(self.place(num_rows), drafts);
        let at = self.nearest_bin(num_rows);
        let bin = &mut self.bins[at];
        let surprise = (seconds / expected).ln() - bin.level;
        let cell = (drafts.round() as usize).min(bin.cells.len() - 1);
        bin.num_seen += 1;
        let rate = (1.0 / bin.num_seen as f32).max(1.0 / SHARE_STEPS);
        for (i, other) in bin.cells.iter_mut().enumerate() {
            other.share += rate * (f32::from(u8::from(i == cell)) - other.share);
            other.fade();
        }
        let part = level_part(bin.cells[cell].share);
        let believed = surprise.clamp(-MOST_SURPRISE, MOST_SURPRISE);
        bin.level += part * LEVEL_RATE.max(1.0 / bin.num_seen as f32) * believed;
        bin.drift += part * DRIFT_RATE * (believed - bin.drift);
        if bin.drift.abs() < MOST_DRIFT {
            let cell = &mut bin.cells[cell];
            cell.correct(believed + cell.correction);
        }
    }

    /// Share of the lately observed steps with about as many rows that had about so many drafts.
    pub(crate) fn share(&self, num_rows: u32, drafts: u32) -> f32 {
        let bin = &self.bins[self.nearest_bin(num_rows)];
        bin.cells
            .get(drafts as usize)
            .map_or(0.0, |cell| cell.share)
    }

    fn nearest_bin(&self, num_rows: u32) -> usize {
        let bin = (num_rows.max(1) as f32).log2().round() as usize;
        bin.min(self.bins.len() - 1)
    }

    fn place(&self, num_rows: u32) -> Place {
        let rows = num_rows.max(1);
        let bin = (rows.ilog2() as usize).min(self.bins.len() - 2);
        let first = (1u32 << bin) as f32;
        Place {
            bin,
            weight: (rows as f32 - first) / first,
        }
    }

    fn at(&self, place: Place, drafts: f32) -> f32 {
        let (low, high) = (&self.bins[place.bin], &self.bins[place.bin + 1]);
        let (low, high) = (low.seconds(drafts), high.seconds(drafts));
        (low + place.weight * (high - low)).max(f32::MIN_POSITIVE)
    }
}

impl Bin {
    fn seconds(&self, drafts: f32) -> f32 {
        let cell = (drafts as usize).min(self.cells.len() - 1);
        let next = (cell + 1).min(self.cells.len() - 1);
        let (low, high) = (self.cells[cell].seconds(), self.cells[next].seconds());
        low + (drafts - cell as f32).min(1.0) * (high - low)
    }
}

impl Cell {
    fn seconds(&self) -> f32 {
        self.base * self.correction.exp()
    }

    fn fade(&mut self) {
        let kept = 1.0 - 1.0 / FADING_STEPS;
        self.correction *= kept;
        self.variance += (1.0 - kept * kept) * (START_VARIANCE - self.variance);
    }

    /// By the median of the last three errors of `base`, so that no single one counts; the less, the more often the cell is
    /// seen, since its surprises are then the level's.
    fn correct(&mut self, error: f32) {
        let [a, b] = self.last;
        let believed = match self.num_seen {
            0 => error,
            1 if error.abs() < a.abs() => error,
            1 => a,
            _ => a.min(b).max(a.max(b).min(error)),
        };
        self.last = [error, a];
        self.num_seen = (self.num_seen + 1).min(2);
        let gain = (1.0 - level_part(self.share)) * self.variance / (self.variance + STEP_VARIANCE);
        self.correction += gain * (believed - self.correction);
        self.variance *= 1.0 - gain;
    }
}

/// How much of a surprise belongs to the level when it comes from a cell with such a share of the steps.
fn level_part(share: f32) -> f32 {
    ((share - (1.0 - DOMINANT)) / (2.0 * DOMINANT - 1.0)).clamp(0.0, 1.0)
}

/// Seconds by drafts of a row, at a number of rows.
struct Curve {
    num_rows: f32,
    /// (drafts, seconds), in order; seconds do not fall.
    points: Vec<(f32, f32)>,
}

fn curves(points: &[CostPoint]) -> Result<Vec<Curve>, CostError> {
    let mut sorted = points.to_vec();
    sorted.sort_by_key(|point| (point.num_rows, point.num_drafts));
    let mut curves: Vec<Curve> = Vec::new();
    for point in sorted {
        let (num_rows, seconds) = (point.num_rows, point.seconds);
        if num_rows == 0 || !seconds.is_finite() || seconds <= 0.0 {
            return Err(CostError::NoTime { num_rows, seconds });
        }
        let num_rows = num_rows as f32;
        if curves.last().is_none_or(|curve| curve.num_rows != num_rows) {
            let points = Vec::new();
            curves.push(Curve { num_rows, points });
        }
        if let Some(curve) = curves.last_mut() {
            let least = curve.points.last().map_or(0.0, |last| last.1);
            let drafts = point.num_drafts as f32;
            curve.points.retain(|&(other, _)| other != drafts);
            curve.points.push((drafts, (seconds as f32).max(least)));
        }
    }
    match curves.iter().find(|curve| curve.points.len() < 2) {
        Some(curve) => Err(CostError::OneLength {
            num_rows: curve.num_rows as u32,
        }),
        None if curves.is_empty() => Err(CostError::Empty),
        None => Ok(curves),
    }
}

/// Along straight lines between the curves' points. Beyond the last curve the last two go on; a single one grows by its
/// slope for every token more.
fn between_curves(curves: &[Curve], num_rows: f32, drafts: f32) -> f32 {
    let at = |curve: &Curve| along(&curve.points, drafts);
    if let [curve] = curves {
        let [.., a, b] = curve.points[..] else {
            return at(curve);
        };
        let a_token = (b.1 - a.1) / (b.0 - a.0) / curve.num_rows;
        return at(curve) + a_token * (num_rows - curve.num_rows).max(0.0) * (drafts + 1.0);
    }
    let by_rows: Vec<(f32, f32)> = curves
        .iter()
        .map(|curve| (curve.num_rows, at(curve)))
        .collect();
    along(&by_rows, num_rows)
}

/// The value at `x` on straight lines through `points`, of which there are at least two; before the first it is the
/// first one's, beyond the last the line goes on, but never down.
fn along(points: &[(f32, f32)], x: f32) -> f32 {
    let next = points
        .iter()
        .position(|point| x < point.0)
        .unwrap_or(points.len() - 1);
    if next == 0 {
        return points[0].1;
    }
    let (a, b) = (points[next - 1], points[next]);
    let slope = (b.1 - a.1) / (b.0 - a.0);
    let slope = if x > b.0 { slope.max(0.0) } else { slope };
    b.1 + slope * (x - b.0)
}
