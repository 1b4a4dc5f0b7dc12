//! What the tests share: a small scheduler, the calls of a step, a device to run what it packs, and random operations.
#![allow(dead_code)] // each test binary uses its part

pub mod any;
pub mod device;

use sonar_scheduler::{Events, NewRequest, PlannedStep, Scheduler, SchedulerConfig, Verdict};

pub fn config() -> SchedulerConfig {
    SchedulerConfig {
        page_size: 4,
        num_pages: 16,
        max_num_seqs: 4,
        max_num_batched_tokens: 16,
        max_model_len: 32,
        vocab_size: 100,
        max_waiting: 16,
        enable_prefix_caching: true,
        page_hash_covers_next_token: false,
        num_speculative_tokens: 0,
        speculate_in_mixed_batches: false,
        eos_token_ids: vec![],
        cache_key: [7; 32],
    }
}

pub fn speculating() -> SchedulerConfig {
    SchedulerConfig {
        num_speculative_tokens: 3,
        eos_token_ids: vec![9],
        ..config()
    }
}

pub fn with(config: &SchedulerConfig, requests: impl IntoIterator<Item = NewRequest>) -> Scheduler {
    let mut scheduler = Scheduler::new(config.clone()).expect("valid");
    for request in requests {
        submit(&mut scheduler, request);
    }
    scheduler
}

pub fn submit(scheduler: &mut Scheduler, request: NewRequest) {
    let valid = request.validate(scheduler.config()).expect("valid");
    scheduler.submit(valid).expect("there is room");
}

/// Plans a step, which there must be, into `words`.
pub fn plan(scheduler: &mut Scheduler, lens: Option<&[i32]>, words: &mut [i32]) -> PlannedStep {
    scheduler
        .plan(lens, words)
        .expect("nothing in flight")
        .expect("there is work")
}

/// Plans and commits a step in which every sampling row emits one token. Returns the requests' ids in row order.
pub fn step(scheduler: &mut Scheduler, token: i32) -> Vec<i64> {
    let mut words = vec![0; scheduler.config().slot_words()];
    let step = plan(scheduler, None, &mut words);
    let num: Vec<i32> = step
        .rows()
        .map(|(_, _, samples)| i32::from(samples))
        .collect();
    let tokens = vec![token; num.len()];
    let mut events = Events::default();
    scheduler
        .commit(step, &Verdict::chain(&num, &tokens, 1), &mut events)
        .expect("it fits");
    events.request_ids
}

/// Free + cached == all: nobody holds a page.
pub fn assert_no_page_held(scheduler: &Scheduler) {
    let stats = scheduler.stats();
    assert_eq!(
        stats.num_free_pages + stats.num_cached_pages,
        stats.num_pages,
        "an idle engine holds pages"
    );
}
