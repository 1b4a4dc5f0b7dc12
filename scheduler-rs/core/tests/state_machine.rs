//! Random submissions, steps, aborts, reverts and resets on tiny page pools, with a vocabulary of 2, so that prefixes
//! collide. A model of the device checks every page that counts as computed, and a model of a request, which knows
//! nothing of scheduling, must come to the same tokens.

mod common;

use common::any::{Ask, Op, VOCAB, any_config, any_op};
use common::assert_no_page_held;
use common::device::{Device, Known, SeenRow};
use proptest::prelude::*;
use sonar_scheduler::sim::{SplitMix, model_token};
use sonar_scheduler::{
    CostPoint, Events, NewRequest, PlannedStep, RequestError, Scheduler, SchedulerConfig, Verdict,
};
use std::collections::{BTreeMap, HashMap};

/// Output and reason (1 stop, 2 length) of a request that runs alone, token by token.
fn expected_output(ask: &Ask, config: &SchedulerConfig) -> (Vec<i32>, i32) {
    let mut tokens = ask.prompt.clone();
    loop {
        let token = model_token(&tokens, VOCAB);
        tokens.push(token);
        let num_output = (tokens.len() - ask.prompt.len()) as u32;
        let is_eos = !ask.ignore_eos && config.eos_token_ids.contains(&token);
        let output = || tokens[ask.prompt.len()..].to_vec();
        if num_output > ask.min_tokens && (is_eos || ask.stop_token_ids.contains(&token)) {
            return (output(), 1);
        }
        if Some(num_output) == ask.max_tokens || tokens.len() as u32 == config.max_model_len {
            return (output(), 2);
        }
    }
}

struct Machine {
    config: SchedulerConfig,
    scheduler: Scheduler,
    device: Device,
    words: Vec<i32>,
    asks: HashMap<u64, Ask>,
    /// Live requests in order of arrival.
    known: HashMap<u64, Known>,
    arrivals: BTreeMap<(i64, u64), u64>,
    aborted: Vec<u64>,
    num_ended: usize,
    next_id: u64,
}

impl Machine {
    fn new(config: SchedulerConfig, adapts: bool) -> Self {
        let mut scheduler =
            Scheduler::new(config.clone()).expect("the strategy makes valid configurations");
        if adapts {
            let points = [0, 1].map(|num_drafts| CostPoint {
                num_rows: 1,
                num_drafts,
                seconds: 5.0,
            });
            scheduler.adapt_draft_length(&points).expect("two lengths");
        }
        Self {
            scheduler,
            device: Device::new(&config),
            words: vec![0x5A5A; config.slot_words()],
            config,
            asks: HashMap::new(),
            known: HashMap::new(),
            arrivals: BTreeMap::new(),
            aborted: Vec::new(),
            num_ended: 0,
            next_id: 1 << 33,
        }
    }

    fn submit(&mut self, ask: Ask) {
        let id = self.next_id;
        let request = NewRequest {
            max_tokens: ask.max_tokens,
            min_tokens: ask.min_tokens,
            stop_token_ids: ask.stop_token_ids.clone(),
            ignore_eos: ask.ignore_eos,
            priority: ask.priority,
            cache_salt: ask.salt.clone(),
            num_speculative_tokens: ask.drafts,
            ..NewRequest::new(id, ask.prompt.clone())
        };
        let is_full = self.scheduler.num_waiting() >= self.config.max_waiting as usize;
        let too_long = ask.prompt.len() >= self.config.max_model_len as usize;
        match request
            .validate(&self.config)
            .and_then(|valid| self.scheduler.submit(valid))
        {
            Ok(()) => {
                assert!(!is_full && !too_long);
                let known = Known {
                    tokens: ask.prompt.clone(),
                    num_prompt: ask.prompt.len(),
                    salt: ask.salt.clone(),
                };
                self.known.insert(id, known);
                self.arrivals.insert((ask.priority, id), id);
                self.asks.insert(id, ask);
                self.next_id += 1;
            }
            Err(RequestError::QueueFull { .. }) => assert!(is_full),
            Err(RequestError::PromptTooLong { .. }) => assert!(too_long),
            Err(error) => panic!("{error}"),
        }
    }

    fn draft_lens(&self, random: &mut SplitMix) -> Vec<i32> {
        (0..self.config.max_num_seqs)
            .map(|_| random.below(5) as i32)
            .collect()
    }

    fn plan(&mut self, random: &mut SplitMix) -> Option<(PlannedStep, Vec<SeenRow>)> {
        let lens = self.draft_lens(random);
        let step = self
            .scheduler
            .plan(Some(&lens), &mut self.words)
            .expect("nothing is in flight")?;
        let rows = self
            .device
            .run(&self.words, &self.known, || random.below(2) as i32);
        self.check_rows(&rows);
        Some((step, rows))
    }

    fn check_rows(&self, rows: &[SeenRow]) {
        let num_tokens: usize = rows.iter().map(|row| row.num_tokens).sum();
        assert!(num_tokens <= self.config.max_num_batched_tokens as usize);
        let is_mixed = rows.iter().any(|row| !row.is_decode);
        for row in rows {
            let (ask, known) = (&self.asks[&row.request], &self.known[&row.request]);
            let num_output = known.tokens.len() - known.num_prompt;
            let most = [
                self.config.num_speculative_tokens as usize,
                ask.drafts.unwrap_or(u32::MAX) as usize,
                (ask.max_tokens.unwrap_or(u32::MAX) as usize).saturating_sub(num_output + 1),
                self.config.max_model_len as usize - known.tokens.len() - 1,
            ];
            assert!(
                most.iter().all(|&most| row.num_drafts <= most),
                "{row:?} {most:?}"
            );
            assert!(row.num_drafts == 0 || row.is_decode);
            assert!(row.num_drafts == 0 || !is_mixed || self.config.speculate_in_mixed_batches);
        }
        // The oldest request of the best priority is in every step, whatever else is.
        let best = self.arrivals.values().find(|id| !self.aborted.contains(id));
        assert!(
            best.is_none_or(|best| rows.iter().any(|row| row.request == *best)),
            "{best:?} is not in {rows:?}"
        );
    }

    /// The model's tokens, as many as a random number of accepted drafts gives.
    fn verdict(&self, rows: &[SeenRow], random: &mut SplitMix) -> (Vec<i32>, Vec<i32>, usize) {
        let width = self.config.num_speculative_tokens as usize + 1;
        let (mut num_emitted, mut tokens) = (Vec::new(), vec![-1; rows.len() * width]);
        for (i, row) in rows.iter().enumerate() {
            let num = if row.samples {
                1 + random.below(row.num_drafts as u64 + 1) as usize
            } else {
                0
            };
            let mut history = self.known[&row.request].tokens.clone();
            for token in &mut tokens[i * width..][..num] {
                *token = model_token(&history, VOCAB);
                history.push(*token);
            }
            num_emitted.push(num as i32);
        }
        (num_emitted, tokens, width)
    }

    fn commit(&mut self, step: PlannedStep, rows: &[SeenRow], random: &mut SplitMix) {
        let (num_emitted, tokens, width) = self.verdict(rows, random);
        // The device writes each accepted draft's own history; a rejected one's place holds another. Where the
        // random drafts of `plan` differ from the model, the accepted positions must be written as the model has it.
        let mut events = Events::default();
        self.device_rewrite(rows, &num_emitted, &tokens, width);
        let seconds = Some(1.0 + random.below(9) as f64);
        let verdict = Verdict::chain(&num_emitted, &tokens, width);
        self.scheduler
            .commit_timed(step, &verdict, seconds, &mut events)
            .expect("it fits");
        self.take(&events);
    }

    fn device_rewrite(
        &mut self,
        rows: &[SeenRow],
        num_emitted: &[i32],
        tokens: &[i32],
        width: usize,
    ) {
        let accepted = rows.iter().enumerate().map(|(i, row)| {
            let num_emitted = num_emitted[i] as usize;
            (row.request, &tokens[i * width..][..num_emitted])
        });
        self.device.accept(&self.known, accepted);
    }

    fn take(&mut self, events: &Events) {
        let mut ids = events.request_ids.clone();
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(
            ids.len(),
            events.len(),
            "two events of one request in a step"
        );
        let mut tokens = events.tokens.as_slice();
        for i in 0..events.len() {
            let id = events.request_ids[i] as u64;
            let (new, rest) = tokens.split_at(events.num_tokens[i] as usize);
            tokens = rest;
            let known = self
                .known
                .get_mut(&id)
                .expect("events of live requests only");
            known.tokens.extend_from_slice(new);
            assert!(events.num_accepted[i] <= events.num_drafted[i]);
            if events.finish[i] != 0 {
                self.finish(id, events.finish[i], events.stop_tokens[i]);
            } else {
                assert!(!new.is_empty(), "an event without content");
            }
        }
        assert!(tokens.is_empty());
        self.scheduler.check_invariants().expect("after events");
    }

    fn finish(&mut self, id: u64, finish: i32, stop_token: i32) {
        let known = self.known.remove(&id).expect("one final event a request");
        let ask = &self.asks[&id];
        self.arrivals.remove(&(ask.priority, id));
        self.num_ended += 1;
        let output = &known.tokens[known.num_prompt..];
        let (expected, reason) = expected_output(ask, &self.config);
        if finish == 3 {
            assert!(self.aborted.contains(&id));
            assert!(expected.starts_with(output));
        } else {
            assert_eq!((output, finish), (expected.as_slice(), reason), "{ask:?}");
            let last = *output.last().expect("output");
            let by_user =
                reason == 1 && (ask.ignore_eos || !self.config.eos_token_ids.contains(&last));
            assert_eq!(stop_token, if by_user { last } else { -1 });
        }
    }

    fn abort(&mut self, pick: usize) {
        let mut live: Vec<u64> = self.known.keys().copied().collect();
        live.sort_unstable();
        let id = if live.is_empty() {
            999
        } else {
            live[pick % live.len()]
        };
        self.scheduler.abort(sonar_scheduler::RequestId(id));
        self.aborted.push(id);
    }

    fn poll(&mut self) {
        let mut events = Events::default();
        self.scheduler.take_ended(&mut events);
        self.take(&events);
    }

    fn step(&mut self, random: &mut SplitMix) -> bool {
        let Some((step, rows)) = self.plan(random) else {
            return false;
        };
        self.commit(step, &rows, random);
        true
    }

    fn apply(&mut self, op: Op) {
        match op {
            Op::Submit(ask) => self.submit(ask),
            Op::Step { seed } => {
                self.step(&mut SplitMix::new(seed));
            }
            Op::Revert { seed } => {
                // The step does not run, so the device never hears of its pages.
                let lens = self.draft_lens(&mut SplitMix::new(seed));
                let planned = self.scheduler.plan(Some(&lens), &mut self.words);
                if let Some(step) = planned.expect("nothing is in flight") {
                    self.scheduler.revert(step);
                }
            }
            Op::BadVerdict { seed } => self.bad_verdict(&mut SplitMix::new(seed)),
            Op::Abort { pick } => self.abort(pick),
            Op::AbortInFlight { seed, pick } => {
                let random = &mut SplitMix::new(seed);
                if let Some((step, rows)) = self.plan(random) {
                    self.abort(pick);
                    if pick % 3 == 0 {
                        self.scheduler.revert(step);
                    } else {
                        self.commit(step, &rows, random);
                    }
                }
            }
            Op::ResetCache => {
                self.scheduler.reset_prefix_cache();
                assert_eq!(self.scheduler.stats().num_cached_pages, 0);
            }
        }
        self.scheduler
            .check_invariants()
            .expect("after every operation");
    }

    fn bad_verdict(&mut self, random: &mut SplitMix) {
        let Some((step, rows)) = self.plan(random) else {
            return;
        };
        let (mut num_emitted, mut tokens, width) = self.verdict(&rows, random);
        match random.below(4) {
            0 => num_emitted[0] = rows[0].num_drafts as i32 + 2,
            1 => tokens.push(0),
            2 => num_emitted.push(1),
            _ => num_emitted[0] = -1,
        }
        let mut events = Events::default();
        let failed = self
            .scheduler
            .commit(
                step,
                &Verdict::chain(&num_emitted, &tokens, width),
                &mut events,
            )
            .expect_err("the verdict does not fit");
        assert!(events.is_empty());
        self.commit(failed.step, &rows, random);
    }
}

proptest! {
    #[test]
    fn any_sequence_of_operations_keeps_the_invariants_and_every_request_gets_its_own_tokens(
        config in any_config(),
        adapts in any::<bool>(),
        ops in proptest::collection::vec(any_op(), 1..60),
    ) {
        let mut machine = Machine::new(config, adapts);
        for op in ops {
            machine.apply(op);
        }
        let random = &mut SplitMix::new(1);
        let mut num_steps = 0;
        while machine.step(random) {
            num_steps += 1;
            prop_assert!(num_steps < 10_000, "the requests never end");
        }
        machine.poll();
        prop_assert!(!machine.scheduler.has_work() && machine.known.is_empty());
        prop_assert_eq!(machine.num_ended, machine.asks.len());
        assert_no_page_held(&machine.scheduler);
    }
}
