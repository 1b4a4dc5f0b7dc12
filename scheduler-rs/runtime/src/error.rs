//! Errors of the runtime, beside those of the scheduler.

use sonar_scheduler::ngram::NgramError;
use sonar_scheduler::{ConfigError, CostError, PlanError, RequestError, VerdictError};
use thiserror::Error;

/// What can go wrong at the handle.
#[derive(Debug, Error)]
#[allow(missing_docs)]
pub enum RuntimeError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    Request(#[from] RequestError),
    #[error(transparent)]
    Plan(#[from] PlanError),
    #[error(transparent)]
    Verdict(#[from] VerdictError),
    #[error(transparent)]
    Cost(#[from] CostError),
    #[error(transparent)]
    Ngram(#[from] NgramError),
    #[error("step {asked} is not in flight{}; commit or revert each planned step once, in order", in_flight_words(*.in_flight))]
    StaleStep { asked: u64, in_flight: Option<u64> },
    #[error("a plan has been started already; take it before starting another")]
    PlanPending,
    #[error("no plan has been started; start one before taking it")]
    NoPlan,
    #[error("there is no packed slot {index}; the slots are 0 and 1")]
    SlotIndex { index: usize },
    #[error("the packed slots ({bytes} bytes of shared memory) could not be mapped: {source}")]
    Map {
        bytes: usize,
        source: std::io::Error,
    },
    #[error("the planner thread could not be started: {0}")]
    Spawn(std::io::Error),
    #[error("the scheduler has failed ({message}); nothing can be served until a new one is made")]
    Dead { message: String },
}

fn in_flight_words(step: Option<u64>) -> String {
    step.map_or_else(|| " (none is)".into(), |step| format!(" (step {step} is)"))
}
