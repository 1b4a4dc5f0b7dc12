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

    fn row(&self, row: usize) -> &'a [i32] {
        &self.tokens[row * self.width..][..self.num_emitted[row] as usize]
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

/// Events written and requests ended so far in a commit.
struct Done {
    num_events: usize,
    num_ended: usize,
}

/// One event's numbers beside the request's own.
struct Outcome {
    num_tokens: usize,
    finish: Option<FinishReason>,
    stop_token: i32,
    num_drafted: u32,
    num_accepted: u32,
    batch_row: i32,
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

    pub(crate) fn push_end(&mut self, request: &Request, finish: FinishReason) {
        let at = self.len();
        self.resize(at + 1);
        let outcome = Outcome {
            num_tokens: 0,
            finish: Some(finish),
            stop_token: -1,
            num_drafted: 0,
            num_accepted: 0,
            batch_row: -1,
        };
        self.set(at, request, &outcome);
    }

    /// Makes room for `len` events in all, or cuts off those beyond.
    fn resize(&mut self, len: usize) {
        self.request_ids.resize(len, 0);
        self.columns()
            .into_iter()
            .for_each(|column| column.resize(len, 0));
    }

    fn set(&mut self, at: usize, request: &Request, outcome: &Outcome) {
        self.request_ids[at] = request.id.0 as i64;
        self.num_tokens[at] = outcome.num_tokens as i32;
        self.finish[at] = outcome.finish.map_or(0, |finish| finish as i32);
        self.stop_tokens[at] = outcome.stop_token;
        self.num_drafted[at] = outcome.num_drafted as i32;
        self.num_accepted[at] = outcome.num_accepted as i32;
        self.num_cached[at] = request.num_cached_tokens as i32;
        self.num_preemptions[at] = request.num_preemptions as i32;
        self.batch_rows[at] = outcome.batch_row;
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
        if let Err(error) = self.check_verdict(&step, verdict) {
            return Err(Box::new(CommitError { step, error }));
        }
        self.in_flight = None;
        events.append(&mut self.ended);
        let first = events.len();
        events.resize(first + step.rows.len());
        let mut done = Done {
            num_events: first,
            num_ended: 0,
        };
        for (i, row) in step.rows.iter().enumerate() {
            self.commit_row(i, row, verdict.row(i), events, &mut done);
        }
        events.resize(done.num_events);
        self.insert_filled();
        if done.num_ended > 0 {
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
        for (i, (row, &got)) in step.rows.iter().zip(verdict.num_emitted).enumerate() {
            let (least, most) = (i32::from(row.samples), row.num_samples() as i32);
            if got < least || got > most {
                return Err(VerdictError::NumEmitted {
                    row: i,
                    got,
                    least,
                    most,
                });
            }
            if got as usize > width {
                return Err(VerdictError::Width { row: i, got, width });
            }
            let vocab_size = self.config.vocab_size;
            if let Some(&id) = verdict.row(i).iter().find(|&&id| id as u32 >= vocab_size) {
                return Err(VerdictError::TokenOutOfRange {
                    row: i,
                    id,
                    vocab_size,
                });
            }
        }
        Ok(())
    }

    /// A request that has ended is marked and still to be removed.
    fn commit_row(
        &mut self,
        i: usize,
        row: &Row,
        emitted: &[i32],
        events: &mut Events,
        done: &mut Done,
    ) {
        let (cache, request, config) = self.parts(row.key);
        if request.is_aborted {
            return;
        }
        let (num_kept, end) = append(request, emitted, &config.eos_token_ids);
        // Of the emitted tokens all but the last were computed as drafts; so were the known tokens before them.
        request.num_computed_tokens += row.num_tokens - row.num_drafts + num_kept.saturating_sub(1);
        request.is_decoding = row.samples;
        settle_pages(row.key, cache, request, config);
        if num_kept > 0 {
            let outcome = Outcome {
                num_tokens: num_kept as usize,
                finish: end.map(|(finish, _)| finish),
                stop_token: end.map_or(-1, |(_, stop_token)| stop_token),
                num_drafted: row.num_drafts,
                num_accepted: (emitted.len() as u32).saturating_sub(1),
                batch_row: i as i32,
            };
            events.set(done.num_events, request, &outcome);
            done.num_events += 1;
            // A handful of tokens: pushing them beats a call that copies.
            for &token in &emitted[..num_kept as usize] {
                events.tokens.push(token);
            }
        }
        request.is_finished = end.is_some();
        done.num_ended += usize::from(end.is_some());
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

/// Appends emitted tokens up to the one that ends the request. Returns how many, and the end with the user's stop
/// token or -1. A stop token ends it also where the length would.
fn append(
    request: &mut Request,
    emitted: &[i32],
    eos_token_ids: &[i32],
) -> (u32, Option<(FinishReason, i32)>) {
    let room = (request.max_len - request.len()) as usize;
    let mut kept = &emitted[..emitted.len().min(room)];
    let mut end = (kept.len() == room).then_some((FinishReason::Length, -1));
    if !request.never_stops {
        let first_counted = request.cold.min_len.saturating_sub(request.len()) as usize;
        for (i, &token) in kept.iter().enumerate().skip(first_counted) {
            if let Some(stop) = request.cold.stop.check(token, eos_token_ids) {
                let stop_token = match stop {
                    Stop::Eos => -1,
                    Stop::User(id) => id,
                };
                end = Some((FinishReason::Stop, stop_token));
                kept = &kept[..=i];
                break;
            }
        }
    }
    for &token in kept {
        request.tokens.push(token);
        request.last_token = token;
    }
    (kept.len() as u32, end)
}
