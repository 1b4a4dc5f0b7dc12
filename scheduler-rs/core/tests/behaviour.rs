//! Rules of stopping, drafting, priorities and caching, one case each.

mod common;

use common::{assert_no_page_held, config};
use sonar_scheduler::packed_batch::{header, read_section, section};
use sonar_scheduler::{
    ConfigError, Events, NewRequest, PlanError, RequestError, RequestId, Scheduler,
    SchedulerConfig, Verdict, VerdictError,
};

/// Runs one request: prefill, then steps that emit the given tokens. Returns its tokens, finish and stop token.
fn run(config: &SchedulerConfig, request: NewRequest, steps: &[&[i32]]) -> (Vec<i32>, i32, i32) {
    let mut scheduler = with(config, [request]);
    let mut words = vec![0; config.slot_words()];
    let (mut output, mut finish, mut stop) = (Vec::new(), 0, -1);
    for emitted in steps {
        let lens = vec![emitted.len().saturating_sub(1) as i32; config.max_num_seqs as usize];
        let step = scheduler
            .plan(Some(&lens), &mut words)
            .expect("nothing in flight")
            .expect("it runs on");
        let mut events = Events::default();
        let num = [emitted.len() as i32];
        scheduler
            .commit(
                step,
                &Verdict::chain(&num, emitted, emitted.len()),
                &mut events,
            )
            .expect("it fits");
        output.extend(&events.tokens);
        if let (Some(&last), Some(&by)) = (events.finish.first(), events.stop_tokens.first()) {
            (finish, stop) = (last, by);
        }
    }
    if finish != 0 {
        assert_no_page_held(&scheduler);
    }
    (output, finish, stop)
}

fn with(config: &SchedulerConfig, requests: impl IntoIterator<Item = NewRequest>) -> Scheduler {
    let mut scheduler = Scheduler::new(config.clone()).expect("valid");
    for request in requests {
        scheduler
            .submit(request.validate(config).expect("valid"))
            .expect("there is room");
    }
    scheduler
}

/// Plans and commits a step in which every sampling row emits one token. Returns the requests' ids in row order.
fn step(scheduler: &mut Scheduler, token: i32) -> Vec<i64> {
    let mut words = vec![0; scheduler.config().slot_words()];
    let step = scheduler
        .plan(None, &mut words)
        .expect("nothing in flight")
        .expect("there is work");
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

fn speculating() -> SchedulerConfig {
    SchedulerConfig {
        num_speculative_tokens: 3,
        eos_token_ids: vec![9],
        ..config()
    }
}

fn request(max_tokens: u32) -> NewRequest {
    NewRequest {
        max_tokens: Some(max_tokens),
        ..NewRequest::new(1, vec![1, 2, 3])
    }
}

#[test]
fn a_stop_token_inside_the_budget_wins() {
    assert_eq!(
        run(&speculating(), request(4), &[&[5], &[6, 9, 7]]),
        (vec![5, 6, 9], 1, -1)
    );
    assert_eq!(
        run(&speculating(), request(3), &[&[5], &[6, 9]]),
        (vec![5, 6, 9], 1, -1)
    );
}

#[test]
fn without_a_stop_the_output_has_exactly_max_tokens() {
    assert_eq!(
        run(&speculating(), request(4), &[&[5], &[6, 7, 8]]),
        (vec![5, 6, 7, 8], 2, -1)
    );
    assert_eq!(run(&speculating(), request(1), &[&[5]]), (vec![5], 2, -1));
}

#[test]
fn nothing_comes_after_an_eos_in_mid_block_unless_it_is_ignored() {
    assert_eq!(
        run(&speculating(), request(20), &[&[5], &[6, 9, 7, 8]]),
        (vec![5, 6, 9], 1, -1)
    );
    let ignoring = NewRequest {
        ignore_eos: true,
        ..request(20)
    };
    assert_eq!(
        run(&speculating(), ignoring, &[&[5], &[6, 9, 7, 8]]),
        (vec![5, 6, 9, 7, 8], 0, -1)
    );
}

#[test]
fn a_users_stop_token_is_named_also_when_eos_is_ignored() {
    let stopping = NewRequest {
        stop_token_ids: vec![7, 9],
        ..request(20)
    };
    assert_eq!(
        run(&speculating(), stopping.clone(), &[&[5], &[6, 7, 9]]),
        (vec![5, 6, 7], 1, 7)
    );
    assert_eq!(
        run(&speculating(), stopping.clone(), &[&[5], &[9, 7]]),
        (vec![5, 9], 1, -1)
    );
    let ignoring = NewRequest {
        ignore_eos: true,
        ..stopping
    };
    assert_eq!(
        run(&speculating(), ignoring, &[&[5], &[9, 7]]),
        (vec![5, 9], 1, 9)
    );
}

#[test]
fn stop_tokens_below_min_tokens_do_not_stop() {
    let asking = |min_tokens| NewRequest {
        min_tokens,
        ..request(20)
    };
    assert_eq!(run(&speculating(), asking(0), &[&[9]]), (vec![9], 1, -1));
    assert_eq!(
        run(&speculating(), asking(1), &[&[9], &[9, 8]]),
        (vec![9, 9], 1, -1)
    );
    assert_eq!(
        run(&speculating(), asking(3), &[&[9], &[9, 9, 8, 9]]),
        (vec![9, 9, 9, 8, 9], 1, -1)
    );
}

#[test]
fn the_context_limit_ends_a_request_exactly_there_and_drafts_stay_below_it() {
    let config = SchedulerConfig {
        max_model_len: 8,
        num_pages: 2,
        ..speculating()
    };
    let mut scheduler = with(&config, [NewRequest::new(1, vec![1, 2, 3])]);
    let mut words = vec![0; config.slot_words()];
    let mut drafts = Vec::new();
    let mut output = Vec::<i32>::new();
    let mut last = Events::default();
    while let Some(step) = scheduler
        .plan(Some(&[3; 4]), &mut words)
        .expect("nothing in flight")
    {
        drafts.push(words[header::NUM_DRAFT_TOKENS]);
        last.clear();
        scheduler
            .commit(step, &Verdict::chain(&[1], &[5], 1), &mut last)
            .expect("it fits");
        output.extend(&last.tokens);
    }
    assert_eq!(drafts, [0, 3, 2, 1, 0]);
    assert_eq!((output.len(), last.finish[0]), (5, 2));
    assert_no_page_held(&scheduler);
}

#[test]
fn a_prompt_one_below_the_limit_gets_one_token_and_a_longer_one_is_refused_with_the_numbers() {
    let config = config();
    let (output, finish, _) = run(&config, NewRequest::new(1, vec![1; 31]), &[&[], &[5]]);
    assert_eq!((output, finish), (vec![5], 2));
    let error = NewRequest::new(1, vec![1; 32])
        .validate(&config)
        .expect_err("too long");
    assert_eq!(
        error,
        RequestError::PromptTooLong {
            num_prompt_tokens: 32,
            max_model_len: 32
        }
    );
    assert!(error.to_string().contains("32 tokens") && error.to_string().contains("at most 31"));
    assert_eq!(
        (error.param(), error.code()),
        (Some("prompt"), "context_length_exceeded")
    );
}

#[test]
fn bad_requests_are_refused_by_name() {
    let config = config();
    let refuse = |request: NewRequest| request.validate(&config).expect_err("bad");
    let ok = || NewRequest::new(1, vec![1]);
    assert_eq!(
        refuse(NewRequest {
            prompt: vec![],
            ..ok()
        }),
        RequestError::EmptyPrompt
    );
    assert_eq!(
        refuse(NewRequest {
            max_tokens: Some(0),
            ..ok()
        }),
        RequestError::NoOutput
    );
    let error = refuse(NewRequest {
        max_tokens: Some(2),
        min_tokens: 3,
        ..ok()
    });
    assert_eq!(
        error,
        RequestError::MinAboveMax {
            min_tokens: 3,
            max_tokens: 2
        }
    );
    for id in [-1, 100, i32::MAX] {
        assert_eq!(
            refuse(NewRequest {
                prompt: vec![1, id],
                ..ok()
            })
            .param(),
            Some("prompt")
        );
        assert_eq!(
            refuse(NewRequest {
                stop_token_ids: vec![id],
                ..ok()
            })
            .param(),
            Some("stop_token_ids")
        );
    }
}

#[test]
fn a_full_queue_and_an_id_in_use_are_refused() {
    let config = SchedulerConfig {
        max_waiting: 2,
        ..config()
    };
    let mut scheduler = with(&config, [1, 2].map(|id| NewRequest::new(id, vec![1])));
    let mut submit = |id| {
        scheduler.submit(
            NewRequest::new(id, vec![1])
                .validate(&config)
                .expect("valid"),
        )
    };
    assert_eq!(
        submit(3),
        Err(RequestError::QueueFull {
            num_waiting: 2,
            max_waiting: 2
        })
    );
    step(&mut scheduler, 5);
    let mut submit = |id| {
        scheduler.submit(
            NewRequest::new(id, vec![1])
                .validate(&config)
                .expect("valid"),
        )
    };
    assert_eq!(submit(2), Err(RequestError::DuplicateId { id: 2 }));
    assert_eq!(submit(3), Ok(()));
}

#[test]
fn decode_rows_draft_beside_a_prefill_only_when_asked_to() {
    for (mixed, expected) in [(false, [0, 0]), (true, [3, 0])] {
        let config = SchedulerConfig {
            speculate_in_mixed_batches: mixed,
            ..speculating()
        };
        let mut scheduler = with(&config, [NewRequest::new(1, vec![1, 2])]);
        step(&mut scheduler, 5);
        scheduler
            .submit(
                NewRequest::new(2, vec![1, 2])
                    .validate(&config)
                    .expect("valid"),
            )
            .expect("there is room");
        let mut words = vec![0; config.slot_words()];
        let planned = scheduler
            .plan(Some(&[3; 4]), &mut words)
            .expect("nothing in flight")
            .expect("work");
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
        let planned = scheduler
            .plan(Some(lens), &mut words)
            .expect("nothing in flight")
            .expect("work");
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
    let planned = scheduler
        .plan(Some(&[3; 4]), &mut words)
        .expect("nothing in flight")
        .expect("work");
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
    let planned = scheduler
        .plan(Some(&[3; 4]), &mut words)
        .expect("nothing in flight")
        .expect("work");
    assert_eq!(scheduler.stats().num_free_pages, before - 1);
    let mut events = Events::default();
    scheduler
        .commit(planned, &Verdict::chain(&[1], &[5], 1), &mut events)
        .expect("it fits");
    assert_eq!((events.num_drafted[0], events.num_accepted[0]), (3, 0));
    assert_eq!(scheduler.stats().num_free_pages, before);
    let planned = scheduler
        .plan(Some(&[3; 4]), &mut words)
        .expect("nothing in flight")
        .expect("work");
    assert_eq!(scheduler.stats().num_free_pages, before - 1);
    scheduler.revert(planned);
    assert_eq!(scheduler.stats().num_free_pages, before);
}

#[test]
fn a_better_priority_takes_the_slot_of_a_worse_one_and_an_equal_one_waits() {
    let config = SchedulerConfig {
        max_num_seqs: 1,
        ..config()
    };
    let asking = |id, priority| NewRequest {
        priority,
        max_tokens: Some(2),
        ..NewRequest::new(id, vec![1, 2])
    };
    let mut scheduler = with(&config, [asking(1, 5)]);
    assert_eq!(step(&mut scheduler, 7), [1]);
    for (id, priority) in [(2, 5), (3, 0)] {
        scheduler
            .submit(asking(id, priority).validate(&config).expect("valid"))
            .expect("there is room");
    }
    let order: Vec<i64> = (0..5).map(|_| step(&mut scheduler, 7)[0]).collect();
    assert_eq!(order, [3, 3, 1, 2, 2]);
    assert_eq!(scheduler.stats().num_preemptions, 1);
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
        scheduler
            .submit(asking(id, salt).validate(&config).expect("valid"))
            .expect("there is room");
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
        scheduler
            .submit(request.validate(config).expect("valid"))
            .expect("there is room");
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

#[test]
fn a_second_plan_a_bad_verdict_and_bad_arguments_change_nothing() {
    let config = config();
    let mut scheduler = with(&config, [NewRequest::new(1, vec![1, 2])]);
    let mut words = vec![0; config.slot_words()];
    assert_eq!(
        scheduler
            .plan(Some(&[0; 3]), &mut words)
            .expect_err("short"),
        PlanError::DraftLens {
            got: 3,
            expected: 4
        }
    );
    assert_eq!(
        scheduler
            .plan(Some(&[0, 0, -1, 0]), &mut words)
            .expect_err("negative"),
        PlanError::NegativeDraftLen { slot: 2, got: -1 }
    );
    assert!(matches!(
        scheduler.plan(None, &mut words[1..]),
        Err(PlanError::BufferTooSmall { .. })
    ));
    let planned = scheduler
        .plan(None, &mut words)
        .expect("nothing in flight")
        .expect("work");
    let id = planned.id();
    assert_eq!(
        scheduler.plan(None, &mut words).expect_err("in flight"),
        PlanError::StepInFlight { step: id }
    );
    let mut events = Events::default();
    let failed = scheduler
        .commit(planned, &Verdict::chain(&[1], &[100], 1), &mut events)
        .expect_err("no such token");
    assert_eq!(
        failed.error,
        VerdictError::TokenOutOfRange {
            row: 0,
            id: 100,
            vocab_size: 100
        }
    );
    scheduler
        .commit(failed.step, &Verdict::chain(&[1], &[99], 1), &mut events)
        .expect("it fits");
    assert_eq!(events.tokens, [99]);
}

#[test]
fn aborts_give_one_final_event_and_free_pages_whenever_they_come() {
    let config = config();
    let mut scheduler = with(&config, [1, 2, 3].map(|id| NewRequest::new(id, vec![1, 2])));
    scheduler.abort(RequestId(3));
    scheduler.abort(RequestId(3));
    scheduler.abort(RequestId(99));
    let mut words = vec![0; config.slot_words()];
    let planned = scheduler
        .plan(None, &mut words)
        .expect("nothing in flight")
        .expect("work");
    scheduler.abort(RequestId(1));
    let mut events = Events::default();
    scheduler
        .commit(planned, &Verdict::chain(&[1, 1], &[5, 5], 1), &mut events)
        .expect("it fits");
    assert_eq!(events.request_ids, [3, 2, 1]);
    assert_eq!(events.finish, [3, 0, 3]);
    assert_eq!(events.batch_rows, [-1, 1, -1]);
    scheduler.abort(RequestId(2));
    events.clear();
    scheduler.take_ended(&mut events);
    assert_eq!((events.request_ids, events.finish), (vec![2], vec![3]));
    assert!(!scheduler.has_work());
    assert_no_page_held(&scheduler);
}

#[test]
fn configurations_that_cannot_work_name_the_numbers() {
    let error = |config: SchedulerConfig| Scheduler::new(config).expect_err("it cannot work");
    let few = error(SchedulerConfig {
        num_pages: 7,
        ..config()
    });
    assert_eq!(
        few,
        ConfigError::TooFewPages {
            num_pages: 7,
            page_size: 4,
            max_model_len: 32,
            needed: 8
        }
    );
    assert!(matches!(
        error(SchedulerConfig {
            page_size: 0,
            ..config()
        }),
        ConfigError::TooSmall { .. }
    ));
    assert!(matches!(
        error(SchedulerConfig {
            num_pages: 1 << 30,
            ..config()
        }),
        ConfigError::TooLarge { .. }
    ));
    assert!(matches!(
        error(SchedulerConfig {
            eos_token_ids: vec![100],
            ..config()
        }),
        ConfigError::EosOutOfRange { .. }
    ));
    assert!(matches!(
        error(SchedulerConfig {
            num_speculative_tokens: 32,
            ..config()
        }),
        ConfigError::DraftsBeyondContext { .. }
    ));
}
