//! Plan, pack and commit of one step, by running requests and drafts: 256-token prompts, prefix cache on, 1 to
//! drafts + 1 tokens emitted a row.

use divan::{Bencher, black_box};
use sonar_scheduler::sim::{RandomAcceptance, SplitMix};
use sonar_scheduler::{Events, NewRequest, Scheduler, SchedulerConfig, Verdict};

fn main() {
    divan::main();
}

const PROMPT_LEN: u32 = 256;
const MODEL_LEN: u32 = 4096;
const VOCAB: u32 = 49_152;

fn config(requests: u32, drafts: u32) -> SchedulerConfig {
    SchedulerConfig {
        page_size: 16,
        num_pages: requests * MODEL_LEN / 16,
        max_num_seqs: requests,
        max_num_batched_tokens: 8192,
        max_model_len: MODEL_LEN,
        vocab_size: VOCAB,
        max_waiting: requests,
        enable_prefix_caching: true,
        page_hash_covers_next_token: false,
        num_speculative_tokens: drafts,
        speculate_in_mixed_batches: false,
        eos_token_ids: vec![2],
        cache_key: [1; 32],
    }
}

/// A scheduler whose requests have all been prefilled, and what a step needs.
struct Running {
    scheduler: Scheduler,
    words: Vec<i32>,
    draft_lens: Vec<i32>,
    acceptance: RandomAcceptance,
    events: Events,
}

impl Running {
    fn new(requests: u32, drafts: u32) -> Self {
        let config = config(requests, drafts);
        let mut random = SplitMix::new(7);
        let mut scheduler = Scheduler::new(config.clone()).expect("valid");
        for id in 0..u64::from(requests) {
            let prompt = (0..PROMPT_LEN)
                .map(|_| random.below(u64::from(VOCAB)) as i32)
                .collect();
            let request = NewRequest {
                ignore_eos: true,
                ..NewRequest::new(id, prompt)
            };
            scheduler
                .submit(request.validate(&config).expect("valid"))
                .expect("there is room");
        }
        let mut running = Self {
            words: vec![0; config.slot_words()],
            draft_lens: vec![drafts as i32; requests as usize],
            acceptance: RandomAcceptance::new(11, VOCAB, drafts as usize + 1),
            events: Events::default(),
            scheduler,
        };
        while running.step() < requests as usize {}
        for _ in 0..4 {
            running.step();
        }
        running
    }

    /// One whole step; returns its events.
    fn step(&mut self) -> usize {
        let lens = Some(self.draft_lens.as_slice());
        let step = self
            .scheduler
            .plan(lens, &mut self.words)
            .expect("nothing in flight")
            .expect("work");
        self.acceptance.decide(&step);
        let verdict = Verdict::chain(
            &self.acceptance.num_emitted,
            &self.acceptance.tokens,
            self.acceptance.width,
        );
        self.events.clear();
        self.scheduler
            .commit(step, &verdict, &mut self.events)
            .expect("it fits");
        self.events.len()
    }
}

#[divan::bench(args = [(1, 0), (1, 3), (64, 0), (64, 3), (256, 0), (256, 3), (1000, 0), (1000, 3)], sample_count = 300)]
fn plan_pack_commit(bencher: Bencher, (requests, drafts): (u32, u32)) {
    let mut running = Running::new(requests, drafts);
    bencher.bench_local(|| black_box(running.step()));
}

/// The part of the bench above that is the simulation of the device.
#[divan::bench(args = [(256, 3), (1000, 3)], sample_count = 300)]
fn simulated_acceptance_alone(bencher: Bencher, (requests, drafts): (u32, u32)) {
    let mut running = Running::new(requests, drafts);
    let lens = running.draft_lens.clone();
    let step = running
        .scheduler
        .plan(Some(&lens), &mut running.words)
        .expect("nothing in flight")
        .expect("work");
    bencher.bench_local(|| running.acceptance.decide(black_box(&step)));
    running.scheduler.revert(step);
}
