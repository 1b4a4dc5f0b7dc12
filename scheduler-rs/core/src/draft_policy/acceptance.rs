//! How likely a draft at each position is accepted, given that the one before it was.

/// Observations that an estimate remembers; older ones fade as newer ones come.
const MEMORY: f32 = 128.0;
/// Steps over which what is known of a position fades while nothing is heard of it.
const FADING_STEPS: f32 = 64.0;
/// What never fades: so many observations hold an estimate where it is, until it is asked again.
const LEAST_KNOWN: f32 = 8.0;
/// Observations that the guess for a new position is worth.
const GUESS_WEIGHT: f32 = 2.0;
/// The guess for the first position; a further one is guessed to be like the one before it. It is a hopeful one, so that
/// drafts are tried: where they are worth nothing some steps show it, but what is not tried is never known.
const FIRST_GUESS: f32 = 0.85;

/// Moving averages over the positions that verification reached, for all requests together.
#[derive(Clone, Debug)]
pub(crate) struct Acceptance {
    positions: Vec<Position>,
    /// Of the step that is being observed: rows that reached so many positions, `[most + 1]`.
    reached: Vec<u32>,
    /// Rows that accepted so many, `[most + 1]`.
    accepted: Vec<u32>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Position {
    /// Faded counts.
    reached: f32,
    accepted: f32,
    /// Observations since the start, up to `MEMORY`.
    num_seen: f32,
}

impl Acceptance {
    /// Nothing is known yet of `most` positions.
    pub(crate) fn new(most: usize) -> Self {
        Self {
            positions: vec![Position::default(); most],
            reached: vec![0; most + 1],
            accepted: vec![0; most + 1],
        }
    }

    /// One row: the first rejected draft is the last one that verification reached.
    #[inline]
    pub(crate) fn add(&mut self, num_drafts: u32, num_accepted: u32) {
        let most = self.positions.len();
        let num_accepted = num_accepted as usize;
        self.reached[(num_accepted + 1).min(num_drafts as usize).min(most)] += 1;
        self.accepted[num_accepted.min(most)] += 1;
    }

    /// Ends a step: its rows enter the averages.
    pub(crate) fn settle(&mut self) {
        let (mut num_reached, mut num_accepted) = (0, 0);
        for (i, position) in self.positions.iter_mut().enumerate().rev() {
            num_reached += std::mem::take(&mut self.reached[i + 1]);
            num_accepted += std::mem::take(&mut self.accepted[i + 1]);
            position.observe(num_reached as f32, num_accepted as f32);
        }
        self.reached[0] = 0;
        self.accepted[0] = 0;
    }

    /// P(draft j accepted | the one before it was), from j = 0 on.
    pub(crate) fn conditional(&self) -> impl Iterator<Item = f32> + '_ {
        self.positions.iter().scan(FIRST_GUESS, |before, position| {
            *before = position.estimate(*before);
            Some(*before)
        })
    }
}

impl Position {
    fn observe(&mut self, num_reached: f32, num_accepted: f32) {
        let most_kept = if num_reached > 0.0 {
            (MEMORY - num_reached).max(0.0)
        } else {
            (self.reached * (1.0 - 1.0 / FADING_STEPS)).max(LEAST_KNOWN)
        };
        if self.reached > most_kept {
            self.accepted *= most_kept / self.reached;
            self.reached = most_kept;
        }
        self.reached += num_reached;
        self.accepted += num_accepted;
        self.num_seen = (self.num_seen + num_reached).min(MEMORY);
    }

    fn estimate(&self, guess: f32) -> f32 {
        let known = if self.reached > 0.0 {
            self.accepted / self.reached
        } else {
            guess
        };
        (self.num_seen * known + GUESS_WEIGHT * guess) / (self.num_seen + GUESS_WEIGHT)
    }
}
