//! Plan, pack and commit of one step, by running requests and drafts: 256-token prompts, prefix cache on, 1 to
//! drafts + 1 tokens emitted a row.

use divan::{Bencher, black_box};
use sonar_scheduler::sim::{RandomAcceptance, SplitMix};
use sonar_scheduler::{
    CostPoint, DraftPolicy, Events, NewRequest, PlannedStep, Scheduler, SchedulerConfig, Verdict,
};

fn main() {
    divan::main();
}

const PROMPT_LEN: u32 = 256;
const MODEL_LEN: u32 = 2048;
/// Verdicts made before the clock runs, used in turn.
const NUM_VERDICTS: usize = 16;
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
    verdicts: Vec<RandomAcceptance>,
    num_steps: usize,
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
            verdicts: Vec::new(),
            num_steps: 0,
            events: Events::default(),
            scheduler,
        };
        let mut acceptance = RandomAcceptance::new(11, VOCAB, drafts as usize + 1);
        while running.prefill(&mut acceptance) < requests as usize {}
        for _ in 0..NUM_VERDICTS {
            running.prefill(&mut acceptance);
            running.verdicts.push(acceptance.clone());
        }
        running
    }

    /// A step with a verdict of its own; returns its events.
    fn prefill(&mut self, acceptance: &mut RandomAcceptance) -> usize {
        let step = self.plan();
        acceptance.decide(&step);
        commit(&mut self.scheduler, step, acceptance, &mut self.events)
    }

    fn plan(&mut self) -> PlannedStep {
        let lens = Some(self.draft_lens.as_slice());
        let planned = self.scheduler.plan(lens, &mut self.words);
        planned.expect("nothing in flight").expect("work")
    }

    /// One whole step of decode rows; returns its events.
    fn step(&mut self) -> usize {
        let step = self.plan();
        self.num_steps += 1;
        let verdict = &self.verdicts[self.num_steps % NUM_VERDICTS];
        commit(&mut self.scheduler, step, verdict, &mut self.events)
    }
}

fn commit(
    scheduler: &mut Scheduler,
    step: PlannedStep,
    acceptance: &RandomAcceptance,
    events: &mut Events,
) -> usize {
    let verdict = Verdict::chain(
        &acceptance.num_emitted,
        &acceptance.tokens,
        acceptance.width,
    );
    events.clear();
    scheduler
        .commit(step, &verdict, events)
        .expect("it fits the step");
    events.len()
}

#[divan::bench(args = [(1, 0), (1, 3), (64, 0), (64, 3), (256, 0), (256, 3), (1000, 0), (1000, 3)], sample_count = 300)]
fn plan_pack_commit(bencher: Bencher, (requests, drafts): (u32, u32)) {
    let mut running = Running::new(requests, drafts);
    bencher.bench_local(|| black_box(running.step()));
}

/// What the policy of draft lengths adds to a step, with up to 8 drafts.
#[divan::bench(args = [1, 64, 256, 1000], sample_count = 300)]
fn draft_policy(bencher: Bencher, requests: u32) {
    let points = [(1, 0), (1, 8), (1000, 0), (1000, 8)].map(|(num_rows, num_drafts)| CostPoint {
        num_rows,
        num_drafts,
        seconds: 1.0 + f64::from(num_rows * (num_drafts + 1)) / 1000.0,
    });
    let mut policy = DraftPolicy::new(&points, 1024, 8).expect("two lengths");
    let mut random = SplitMix::new(5);
    let accepted: Vec<u32> = (0..requests).map(|_| random.below(9) as u32).collect();
    bencher.bench_local(|| {
        let length = policy.choose(requests, &[requests; 8]);
        policy.planned(requests, length, length * requests);
        for &accepted in &accepted {
            policy.add_row(length, accepted.min(length));
        }
        policy.ended(Some(1.0));
        black_box(length)
    });
}
