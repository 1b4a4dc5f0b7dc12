//! The scheduler of the engine: which requests run in a step, over which pages, and what a step left behind.
//!
//! A step is a value: [`Scheduler::plan`] makes a [`PlannedStep`] and writes it as one flat i32 buffer,
//! [`Scheduler::commit`] or [`Scheduler::revert`] consumes it. There are no threads, no I/O and no clock here.
//!
//! Words: a *page* holds `page_size` positions of keys and values; a *slot* is the stable place of a running
//! request; `num_computed_tokens` catches up with prompt + output + drafts, which makes chunked prefill, prefix
//! hits, decoding and verification one rule.
#![forbid(unsafe_code)]
#![deny(missing_docs)]

pub mod commit;
pub mod config;
pub mod draft_policy;
pub mod error;
pub mod ids;
pub mod ngram;
pub mod packed_batch;
pub mod page_pool;
pub mod prefix_cache;
pub mod request;
pub mod scheduler;
pub mod sim;

pub use commit::{Events, FinishReason, Verdict};
pub use config::SchedulerConfig;
pub use draft_policy::{CostError, CostPoint, DraftPolicy};
pub use error::{CommitError, ConfigError, PlanError, RequestError, VerdictError};
pub use ids::{PageId, RequestId, Slot, StepId};
pub use request::{NewRequest, ValidRequest};
pub use scheduler::{PlannedStep, Scheduler, Stats};
