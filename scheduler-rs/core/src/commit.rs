//! What a step leaves behind: accepted tokens, stop rules, cached pages, pages given back, events.

use crate::config::SchedulerConfig;
use crate::error::{CommitError, VerdictError};
use crate::ids::RequestKey;
use crate::prefix_cache::PrefixCache;
use crate::request::{Request, Stop};
use crate::scheduler::{PlannedStep, Row, Scheduler};

/// Why a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// A stop token.
    Stop = 1,
    /// `max_tokens` or the context limit.
    Length = 2,
    /// Somebody asked.
    Abort = 3,
}

/// Calls a function over rows of `$width` with that width as its constant W, 0 for a wide one. Rows are short, and loops of
/// a known length are unrolled.
macro_rules! by_width {
    ($width:expr, $object:ident.$function:ident($($argument:expr),*)) => {
        match $width {
            1 => $object.$function::<1>($($argument),*),
            2 => $object.$function::<2>($($argument),*),
            3 => $object.$function::<3>($($argument),*),
            4 => $object.$function::<4>($($argument),*),
            5 => $object.$function::<5>($($argument),*),
            6 => $object.$function::<6>($($argument),*),
            _ => $object.$function::<0>($($argument),*),
        }
    };
}

/// What verification decided, for every row of the step. R = rows, W = width.
///
/// `num_emitted[r]` is 0 where the row does not sample, else accepted drafts + 1; `tokens[r * W..][..num_emitted[r]]`
/// are the accepted path's drafts, then the recovered or bonus token. In a chain the path is its length.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Verdict<'a> {
    /// `[R]`
    pub num_emitted: &'a [i32],
    /// `[R, W]`
    pub tokens: &'a [i32],
    /// W
    pub width: usize,
}

impl<'a> Verdict<'a> {
    /// The verdict on chains.
    pub fn chain(num_emitted: &'a [i32], tokens: &'a [i32], width: usize) -> Self {
        Self {
            num_emitted,
            tokens,
            width,
        }
    }

    /// All tokens of a row, those beyond `num_emitted` undefined.
    fn row(&self, row: usize) -> &'a [i32] {
        &self.tokens[row * self.width..][..self.width]
    }

    /// Whether [`Self::check_row`] has nothing to say about any row, by arithmetic alone. W: see `by_width`.
    fn fits<const W: usize>(&self, rows: &[Row], vocab_size: u32) -> bool {
        let width = if W > 0 { W } else { self.width };
        let mut num_wrong = u32::from(width == 0);
        for ((row, &got), path) in rows
            .iter()
            .zip(self.num_emitted)
            .zip(self.tokens.chunks_exact(width.max(1)))
        {
            let most = (row.num_samples() as i32).min(width as i32);
            num_wrong += u32::from(got < i32::from(row.samples)) + u32::from(got > most);
            for (j, &id) in (0..).zip(path) {
                num_wrong += u32::from(j < got) & u32::from(id as u32 >= vocab_size);
            }
        }
        num_wrong == 0
    }

    fn check_row(
        &self,
        i: usize,
        row: &Row,
        got: i32,
        vocab_size: u32,
    ) -> Result<(), VerdictError> {
        let (least, most) = (i32::from(row.samples), row.num_samples() as i32);
        if got < least || got > most {
            return Err(VerdictError::NumEmitted {
                row: i,
                got,
                least,
                most,
            });
        }
        let width = self.width;
        if got as usize > width {
            return Err(VerdictError::Width { row: i, got, width });
        }
        let outside = |&&id: &&i32| id as u32 >= vocab_size;
        match self.row(i)[..got as usize].iter().find(outside) {
            Some(&id) => Err(VerdictError::TokenOutOfRange {
                row: i,
                id,
                vocab_size,
            }),
            None => Ok(()),
        }
    }
}

/// Columns of events, at most one a request and step: new tokens, or its end, or both.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Events {
    /// The caller's ids.
    pub request_ids: Vec<i64>,
    /// New tokens of each event; they lie one after the other in `tokens`.
    pub num_tokens: Vec<i32>,
    /// 0 while the request runs on, else a [`FinishReason`].
    pub finish: Vec<i32>,
    /// The user's stop token that ended it, -1 for none.
    pub stop_tokens: Vec<i32>,
    /// Drafts verified in this step.
    pub num_drafted: Vec<i32>,
    /// Of these, accepted by verification, also beyond a stop.
    pub num_accepted: Vec<i32>,
    /// Prompt tokens found in the prefix cache at first admission.
    pub num_cached: Vec<i32>,
    /// Preemptions of the request so far.
    pub num_preemptions: Vec<i32>,
    /// Row of the committed batch, -1 for none.
    pub batch_rows: Vec<i32>,
    /// Tokens of all events.
    pub tokens: Vec<i32>,
}

impl Events {
    /// Events in all.
    pub fn len(&self) -> usize {
        self.request_ids.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.request_ids.is_empty()
    }

    /// Removes all events and keeps the memory.
    pub fn clear(&mut self) {
        self.request_ids.clear();
        self.tokens.clear();
        self.columns().into_iter().for_each(Vec::clear);
    }

    /// Moves all events of `other` to the end.
    pub fn append(&mut self, other: &mut Events) {
        self.request_ids.append(&mut other.request_ids);
        self.tokens.append(&mut other.tokens);
        for (to, from) in self.columns().into_iter().zip(other.columns()) {
            to.append(from);
        }
    }

    /// The end of a request outside a commit.
    pub(crate) fn push_end(&mut self, request: &Request, finish: FinishReason) {
        self.request_ids.push(request.id.0 as i64);
        self.num_tokens.push(0);
        self.finish.push(finish as i32);
        self.stop_tokens.push(-1);
        self.num_drafted.push(0);
        self.num_accepted.push(0);
        self.num_cached.push(request.num_cached_tokens as i32);
        self.num_preemptions
            .push(i32::from(request.num_preemptions));
        self.batch_rows.push(-1);
    }

    /// An event for each row, a column at a time; it goes on, and the tokens that it keeps are still to be written.
    fn push_rows(&mut self, rows: &[Row], verdict: &Verdict) {
        let (num_emitted, width) = (verdict.num_emitted, verdict.width);
        let len = self.len() + rows.len();
        self.tokens.reserve(rows.len() * width);
        self.num_tokens.resize(len, 0);
        self.finish.resize(len, 0);
        self.stop_tokens.resize(len, -1);
        self.batch_rows.extend(0..rows.len() as i32);
        self.num_accepted
            .extend(num_emitted.iter().map(|&num| (num - 1).max(0)));
        self.request_ids
            .extend(rows.iter().map(|row| row.id.0 as i64));
        self.num_drafted
            .extend(rows.iter().map(|row| row.num_drafts as i32));
        self.num_cached
            .extend(rows.iter().map(|row| row.num_cached_tokens as i32));
        self.num_preemptions
            .extend(rows.iter().map(|row| i32::from(row.num_preemptions)));
    }

    /// Removes the events from `first` on that have no tokens.
    fn remove_silent(&mut self, first: usize) {
        let speaks: Vec<bool> = self.num_tokens.iter().map(|&num| num > 0).collect();
        let keeps = |i: usize| i < first || speaks[i];
        let mut at = 0..;
        self.request_ids.retain(|_| at.next().is_none_or(keeps));
        for column in self.columns() {
            let mut at = 0..;
            column.retain(|_| at.next().is_none_or(keeps));
        }
    }

    /// The columns with one i32 an event.
    fn columns(&mut self) -> [&mut Vec<i32>; 8] {
        [
            &mut self.num_tokens,
            &mut self.finish,
            &mut self.stop_tokens,
            &mut self.num_drafted,
            &mut self.num_accepted,
            &mut self.num_cached,
            &mut self.num_preemptions,
            &mut self.batch_rows,
        ]
    }
}

impl Scheduler {
    /// Ends a step that ran: appends accepted tokens, applies the stop rules, enters full pages into the prefix
    /// cache, gives back pages that only rejected drafts needed, and adds an event for every request with new tokens
    /// or an end, pending ends included.
    ///
    /// # Errors
    /// The verdict does not fit the step. The step comes back untouched, to be committed again or reverted.
    pub fn commit(
        &mut self,
        step: PlannedStep,
        verdict: &Verdict,
        events: &mut Events,
    ) -> Result<(), Box<CommitError>> {
        self.commit_timed(step, verdict, None, events)
    }

    /// As [`Self::commit`]; `seconds` is the time from the end of the step before to the end of this one, where these
    /// came one after the other. The policy of draft lengths learns from it.
    ///
    /// # Errors
    /// As [`Self::commit`].
    pub fn commit_timed(
        &mut self,
        step: PlannedStep,
        verdict: &Verdict,
        seconds: Option<f64>,
        events: &mut Events,
    ) -> Result<(), Box<CommitError>> {
        if let Err(error) = self.check_verdict(&step, verdict) {
            return Err(Box::new(CommitError { step, error }));
        }
        self.in_flight = None;
        if let Some(policy) = &mut self.draft_policy {
            for (row, &num) in step.rows.iter().zip(verdict.num_emitted) {
                policy.add_row(row.num_drafts, (num - 1).max(0) as u32);
            }
            policy.ended(seconds.map(|seconds| seconds as f32));
        }
        events.append(&mut self.ended);
        let num_ended = by_width!(verdict.width, self.commit_rows(&step.rows, verdict, events));
        self.insert_filled();
        if num_ended > 0 {
            self.end_finished(&step);
        }
        self.end_aborted();
        events.append(&mut self.ended);
        self.recycle(step);
        debug_assert_eq!(self.check_invariants(), Ok(()));
        Ok(())
    }

    fn check_verdict(&self, step: &PlannedStep, verdict: &Verdict) -> Result<(), VerdictError> {
        let expected = step.rows.len();
        let (rows, width) = (verdict.num_emitted.len(), verdict.width);
        if self.in_flight != Some(step.id()) {
            return Err(VerdictError::ForeignStep { step: step.id() });
        }
        if rows != expected {
            return Err(VerdictError::NumRows {
                got: rows,
                expected,
            });
        }
        if verdict.tokens.len() != rows * width {
            return Err(VerdictError::NumTokens {
                got: verdict.tokens.len(),
                rows,
                width,
            });
        }
        let vocab_size = self.config.vocab_size;
        if by_width!(width, verdict.fits(&step.rows, vocab_size)) {
            return Ok(());
        }
        let rows = step.rows.iter().zip(verdict.num_emitted).enumerate();
        for (i, (row, &got)) in rows {
            verdict.check_row(i, row, got, vocab_size)?;
        }
        Ok(())
    }

    /// Returns how many requests have ended; they are marked and still to be removed. W: see `by_width`.
    fn commit_rows<const W: usize>(
        &mut self,
        rows: &[Row],
        verdict: &Verdict,
        events: &mut Events,
    ) -> usize {
        let width = if W > 0 { W } else { verdict.width };
        let first = events.len();
        events.push_rows(rows, verdict);
        let (mut num_ended, mut num_silent) = (0, 0);
        for (i, row) in rows.iter().enumerate() {
            let path = &verdict.tokens[i * width..][..width];
            let (num_kept, end) = self.commit_row(row, path, verdict.num_emitted[i] as u32);
            let num_tokens = events.tokens.len() + num_kept as usize;
            events.tokens.extend_from_slice(path);
            events.tokens.truncate(num_tokens);
            events.num_tokens[first + i] = num_kept as i32;
            num_silent += usize::from(num_kept == 0);
            if let Some((finish, stop_token)) = end {
                events.finish[first + i] = finish as i32;
                events.stop_tokens[first + i] = stop_token;
                num_ended += 1;
            }
        }
        if num_silent > 0 {
            events.remove_silent(first);
        }
        num_ended
    }

    /// Returns how many of the emitted tokens the request keeps, and its end with the user's stop token or -1.
    ///
    /// `path` holds the emitted tokens and undefined ones behind. All of it is copied and then cut: counts differ
    /// from row to row, and a branch on them costs more than the copy.
    #[inline(always)]
    fn commit_row(
        &mut self,
        row: &Row,
        path: &[i32],
        num_emitted: u32,
    ) -> (u32, Option<(FinishReason, i32)>) {
        let (cache, request, config) = self.parts(row.key);
        if request.is_aborted {
            return (0, None);
        }
        let may_end = !request.never_stops || num_emitted >= request.max_len - request.len();
        let (num_kept, end) = if may_end {
            keep(
                request,
                &path[..num_emitted as usize],
                &config.eos_token_ids,
            )
        } else {
            (num_emitted, None)
        };
        request.append(path, num_kept);
        // Of the emitted tokens all but the last were computed as drafts; so were the known tokens before them.
        request.num_computed_tokens += row.num_tokens - row.num_drafts + num_kept.saturating_sub(1);
        request.is_decoding = row.samples;
        request.is_finished = end.is_some();
        settle_pages(row.key, cache, request, config);
        (num_kept, end)
    }

    fn end_finished(&mut self, step: &PlannedStep) {
        let finished: Vec<RequestKey> = step
            .rows
            .iter()
            .map(|row| row.key)
            .filter(|&key| self.request(key).is_finished)
            .collect();
        for key in finished {
            self.end(key);
        }
    }
}

/// Hands pages that have filled up to the prefix cache and gives back those that only drafts needed.
#[inline]
fn settle_pages(
    key: RequestKey,
    cache: &mut PrefixCache,
    request: &mut Request,
    config: &SchedulerConfig,
) {
    let page_size = config.page_size;
    if request.num_computed_tokens >= (request.num_full_pages + 1) * page_size {
        let pages =
            request.num_full_pages as usize..(request.num_computed_tokens / page_size) as usize;
        request.num_full_pages = pages.end as u32;
        request.find_open_places(page_size);
        let cold = &mut *request.cold;
        cache.fill(
            key,
            &mut cold.chain,
            cold.cache_salt.as_deref(),
            &request.tokens,
            &request.pages,
            pages,
        );
    }
    let positions = (request.len() + config.extra_positions()).min(config.max_model_len);
    if request.pages.len() as u32 * page_size >= positions + page_size {
        cache.release_from(&mut request.pages, positions.div_ceil(page_size) as usize);
    }
}

/// How many emitted tokens a request keeps: up to the one that ends it; and the end with the user's stop token or -1.
/// A stop token ends it also where the length would.
fn keep(
    request: &Request,
    emitted: &[i32],
    eos_token_ids: &[i32],
) -> (u32, Option<(FinishReason, i32)>) {
    let room = (request.max_len - request.len()) as usize;
    let kept = &emitted[..emitted.len().min(room)];
    if !request.never_stops {
        let first_counted = request.cold.min_len.saturating_sub(request.len()) as usize;
        for (i, &token) in kept.iter().enumerate().skip(first_counted) {
            if let Some(stop) = request.cold.stop.check(token, eos_token_ids) {
                let stop_token = match stop {
                    Stop::Eos => -1,
                    Stop::User(id) => id,
                };
                return (i as u32 + 1, Some((FinishReason::Stop, stop_token)));
            }
        }
    }
    let end = (kept.len() == room).then_some((FinishReason::Length, -1));
    (kept.len() as u32, end)
}
