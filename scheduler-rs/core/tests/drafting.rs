//! How many tokens are drafted, and what the n-gram lookup proposes.

mod common;

use common::{config, plan, speculating, step, submit, with};
use sonar_scheduler::packed_batch::{read_section, section};
use sonar_scheduler::{NewRequest, SchedulerConfig};

#[test]
fn decode_rows_draft_beside_a_prefill_only_when_asked_to() {
    for (mixed, expected) in [(false, [0, 0]), (true, [3, 0])] {
        let config = SchedulerConfig {
            speculate_in_mixed_batches: mixed,
            ..speculating()
        };
        let mut scheduler = with(&config, [NewRequest::new(1, vec![1, 2])]);
        step(&mut scheduler, 5);
        submit(&mut scheduler, NewRequest::new(2, vec![1, 2]));
        let mut words = vec![0; config.slot_words()];
        let planned = plan(&mut scheduler, Some(&[3; 4]), &mut words);
        assert_eq!(
            read_section(&words, section::NUM_DRAFT_TOKENS),
            Some(expected.as_slice()),
            "mixed: {mixed}"
        );
        scheduler.revert(planned);
    }
}

#[test]
fn drafts_share_a_small_budget_and_respect_every_cap() {
    let config = SchedulerConfig {
        max_num_batched_tokens: 8,
        ..speculating()
    };
    let capped = |id, cap| NewRequest {
        num_speculative_tokens: cap,
        ..NewRequest::new(id, vec![1, 2])
    };
    let mut scheduler = with(
        &config,
        [
            capped(1, None),
            capped(2, Some(1)),
            capped(3, Some(0)),
            capped(4, None),
        ],
    );
    step(&mut scheduler, 5);
    let mut words = vec![0; config.slot_words()];
    let mut drafts = |lens: &[i32]| {
        let planned = plan(&mut scheduler, Some(lens), &mut words);
        let drafts = read_section(&words, section::NUM_DRAFT_TOKENS)
            .expect("packed")
            .to_vec();
        scheduler.revert(planned);
        drafts
    };
    assert_eq!(drafts(&[9; 4]), [2, 1, 0, 1]);
    assert_eq!(drafts(&[1, 0, 3, 3]), [1, 0, 0, 3]);
}

#[test]
fn ngrams_propose_what_followed_the_longest_and_latest_match() {
    let config = SchedulerConfig {
        num_speculative_tokens: 3,
        max_model_len: 64,
        num_pages: 32,
        max_num_batched_tokens: 64,
        ..config()
    };
    let propose = |prompt: Vec<i32>, next| {
        let mut scheduler = with(&config, [NewRequest::new(1, prompt)]);
        step(&mut scheduler, next);
        let (mut tokens, mut lens) = (vec![-1; 12], vec![-1; 4]);
        let num = scheduler
            .propose_ngram(3, 2, 3, &mut tokens, &mut lens)
            .expect("it fits");
        assert_eq!((num as i32, &lens[1..]), (lens[0], [0, 0, 0].as_slice()));
        tokens[..num].to_vec()
    };
    assert_eq!(propose(vec![1, 2, 3, 4, 5, 6, 1, 2], 3), [4, 5, 6]);
    assert_eq!(
        propose(vec![1, 2, 7, 8, 9, 1, 2, 4, 5, 6, 1], 2),
        [4, 5, 6],
        "the latest of two"
    );
    assert_eq!(
        propose(vec![0, 1, 2, 7, 8, 9, 1, 2, 4, 5, 6, 0, 1], 2),
        [7, 8, 9],
        "the longest of two"
    );
    assert_eq!(propose(vec![4, 5, 4, 5, 4], 5), [4, 5, 4], "a loop goes on");
    assert!(propose(vec![1, 2, 3, 4, 5], 6).is_empty());
}

#[test]
fn ngrams_keep_to_the_requests_own_limits() {
    let config = SchedulerConfig {
        num_speculative_tokens: 3,
        ..config()
    };
    let looping = |id| NewRequest::new(id, vec![4, 5, 4, 5, 4]);
    let requests = [
        NewRequest {
            num_speculative_tokens: Some(1),
            ..looping(1)
        },
        NewRequest {
            num_speculative_tokens: Some(0),
            ..looping(2)
        },
        NewRequest {
            max_tokens: Some(3),
            ..looping(3)
        },
    ];
    let mut scheduler = with(&config, requests);
    step(&mut scheduler, 5);
    let (mut tokens, mut lens) = (vec![-1; 12], vec![-1; 4]);
    assert_eq!(
        scheduler.propose_ngram(3, 2, 3, &mut tokens, &mut lens),
        Ok(2)
    );
    assert_eq!(lens, [1, 0, 1, 0]);
    assert!(
        scheduler
            .propose_ngram(3, 0, 3, &mut tokens, &mut lens)
            .is_err()
    );
    assert!(
        scheduler
            .propose_ngram(2, 2, 3, &mut tokens, &mut lens)
            .is_err()
    );
}
