//! Rules of stopping, priorities and aborts, one case each.

mod common;

use common::{assert_no_page_held, config, plan, speculating, step, submit, with};
use sonar_scheduler::packed_batch::header;
use sonar_scheduler::{Events, NewRequest, RequestError, RequestId, SchedulerConfig, Verdict};

/// Runs one request: prefill, then steps that emit the given tokens. Returns its tokens, finish and stop token.
fn run(config: &SchedulerConfig, request: NewRequest, steps: &[&[i32]]) -> (Vec<i32>, i32, i32) {
    let mut scheduler = with(config, [request]);
    let mut words = vec![0; config.slot_words()];
    let (mut output, mut finish, mut stop) = (Vec::new(), 0, -1);
    for emitted in steps {
        let lens = vec![emitted.len().saturating_sub(1) as i32; config.max_num_seqs as usize];
        let step = plan(&mut scheduler, Some(&lens), &mut words);
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
        submit(&mut scheduler, asking(id, priority));
    }
    let order: Vec<i64> = (0..5).map(|_| step(&mut scheduler, 7)[0]).collect();
    assert_eq!(order, [3, 3, 1, 2, 2]);
    assert_eq!(scheduler.stats().num_preemptions, 1);
}

#[test]
fn aborts_give_one_final_event_and_free_pages_whenever_they_come() {
    let config = config();
    let mut scheduler = with(&config, [1, 2, 3].map(|id| NewRequest::new(id, vec![1, 2])));
    scheduler.abort(RequestId(3));
    scheduler.abort(RequestId(3));
    scheduler.abort(RequestId(99));
    let mut words = vec![0; config.slot_words()];
    let planned = plan(&mut scheduler, None, &mut words);
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
