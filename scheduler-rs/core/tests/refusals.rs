//! What cannot work is refused by name and changes nothing.

mod common;

use common::{config, plan, step, with};
use sonar_scheduler::{
    ConfigError, Events, NewRequest, PlanError, RequestError, Scheduler, SchedulerConfig, Verdict,
    VerdictError,
};

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
    let submit = |scheduler: &mut Scheduler, id| {
        let request = NewRequest::new(id, vec![1]).validate(&config);
        scheduler.submit(request.expect("valid"))
    };
    assert_eq!(
        submit(&mut scheduler, 3),
        Err(RequestError::QueueFull {
            num_waiting: 2,
            max_waiting: 2
        })
    );
    step(&mut scheduler, 5);
    assert_eq!(
        submit(&mut scheduler, 2),
        Err(RequestError::DuplicateId { id: 2 })
    );
    assert_eq!(submit(&mut scheduler, 3), Ok(()));
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
    let planned = plan(&mut scheduler, None, &mut words);
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
