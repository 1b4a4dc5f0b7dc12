//! Pages that drafts take and give back, and prefixes that requests share.

mod common;

use common::{config, plan, speculating, step, submit, with};
use sonar_scheduler::packed_batch::{read_section, section};
use sonar_scheduler::{Events, NewRequest, Scheduler, SchedulerConfig, Verdict};

#[test]
fn a_draft_without_a_page_is_cut_and_nobody_is_preempted_for_it() {
    let config = SchedulerConfig {
        num_pages: 5,
        max_model_len: 16,
        ..speculating()
    };
    let mut scheduler = with(
        &config,
        [
            NewRequest::new(1, vec![1; 5]),
            NewRequest::new(2, vec![2; 5]),
        ],
    );
    step(&mut scheduler, 5);
    // Both hold two of the five pages: 8 positions, of which the next token and the drafter's own take 7.
    let mut words = vec![0; config.slot_words()];
    let planned = plan(&mut scheduler, Some(&[3; 4]), &mut words);
    assert_eq!(
        read_section(&words, section::NUM_DRAFT_TOKENS),
        Some([3, 1].as_slice())
    );
    scheduler.revert(planned);
    assert_eq!(scheduler.stats().num_preemptions, 0);
}

#[test]
fn pages_that_only_rejected_drafts_needed_are_given_back() {
    let config = speculating();
    let mut scheduler = with(&config, [NewRequest::new(1, vec![1; 5])]);
    step(&mut scheduler, 5);
    let before = scheduler.stats().num_free_pages;
    let mut words = vec![0; config.slot_words()];
    let planned = plan(&mut scheduler, Some(&[3; 4]), &mut words);
    assert_eq!(scheduler.stats().num_free_pages, before - 1);
    let mut events = Events::default();
    scheduler
        .commit(planned, &Verdict::chain(&[1], &[5], 1), &mut events)
        .expect("it fits");
    assert_eq!((events.num_drafted[0], events.num_accepted[0]), (3, 0));
    assert_eq!(scheduler.stats().num_free_pages, before);
    let planned = plan(&mut scheduler, Some(&[3; 4]), &mut words);
    assert_eq!(scheduler.stats().num_free_pages, before - 1);
    scheduler.revert(planned);
    assert_eq!(scheduler.stats().num_free_pages, before);
}

#[test]
fn prefixes_are_shared_under_the_same_salt_only_and_not_after_a_reset() {
    let config = config();
    let asking = |id, salt: Option<&[u8]>| NewRequest {
        cache_salt: salt.map(Into::into),
        max_tokens: Some(1),
        ..NewRequest::new(id, vec![1; 9])
    };
    let mut scheduler = Scheduler::new(config.clone()).expect("valid");
    let mut hits = |id, salt, reset| {
        if reset {
            assert!(scheduler.reset_prefix_cache());
        }
        let before = scheduler.stats().prefix_hits;
        submit(&mut scheduler, asking(id, salt));
        step(&mut scheduler, 5);
        scheduler.stats().prefix_hits - before
    };
    assert_eq!(hits(1, None, false), 0);
    assert_eq!(hits(2, None, false), 8);
    assert_eq!(hits(3, Some(b"a"), false), 0);
    assert_eq!(hits(4, Some(b"b"), false), 0);
    assert_eq!(hits(5, Some(b"a"), false), 8);
    assert_eq!(hits(6, None, true), 0);
    assert_eq!(scheduler.stats().prefix_queries, 54);
}

/// Prompt tokens that each prompt finds in the cache, one after the other; every request emits token 5.
fn hits_of(config: &SchedulerConfig, prompts: &[&[i32]]) -> Vec<u64> {
    let mut scheduler = Scheduler::new(config.clone()).expect("valid");
    let mut hits = Vec::new();
    for (id, prompt) in (1..).zip(prompts) {
        let before = scheduler.stats().prefix_hits;
        let request = NewRequest {
            max_tokens: Some(1),
            ..NewRequest::new(id, prompt.to_vec())
        };
        submit(&mut scheduler, request);
        step(&mut scheduler, 5);
        hits.push(scheduler.stats().prefix_hits - before);
    }
    hits
}

#[test]
fn where_entries_depend_on_the_next_token_a_page_is_found_only_before_the_same_token() {
    let covering = SchedulerConfig {
        page_hash_covers_next_token: true,
        ..config()
    };
    let prompts: [&[i32]; 5] = [
        &[1, 1, 1, 1, 2, 2, 2, 2], // fills both pages; the second one's next token is the output 5
        &[1, 1, 1, 1, 3, 3, 3, 3, 4], // the first page, before another token
        &[1, 1, 1, 1, 3, 3, 3, 3, 4], // both, before the same tokens
        &[1, 1, 1, 1, 2, 2, 2, 2, 5],
        &[1, 1, 1, 1, 2, 2, 2, 2, 6],
    ];
    assert_eq!(hits_of(&covering, &prompts), [0, 0, 8, 8, 4]);
    assert_eq!(hits_of(&config(), &prompts), [0, 4, 8, 8, 8]);
}

#[test]
fn without_prefix_caching_every_page_is_free_at_the_end() {
    let config = SchedulerConfig {
        enable_prefix_caching: false,
        ..config()
    };
    let mut scheduler = with(
        &config,
        [1, 2].map(|id| NewRequest {
            max_tokens: Some(1),
            ..NewRequest::new(id, vec![1; 6])
        }),
    );
    step(&mut scheduler, 5);
    let stats = scheduler.stats();
    assert_eq!(
        (stats.num_free_pages, stats.prefix_hits),
        (config.num_pages, 0)
    );
}
