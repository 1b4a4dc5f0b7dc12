//! Typed errors; each message says what was wrong and what would be right.

use crate::ids::StepId;
use crate::scheduler::PlannedStep;
use thiserror::Error;

/// A configuration that cannot work.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[allow(missing_docs)] // the fields are the numbers of the message
pub enum ConfigError {
    #[error("{name} is {got}; it must be at least {least}")]
    TooSmall {
        name: &'static str,
        got: u32,
        least: u32,
    },
    #[error(
        "{name} is {got}; it must be below 2147483648, since the packed step holds 32-bit words"
    )]
    TooLarge { name: &'static str, got: u64 },
    #[error(
        "num_speculative_tokens is {num_speculative_tokens}; it must be below max_model_len ({max_model_len})"
    )]
    DraftsBeyondContext {
        num_speculative_tokens: u32,
        max_model_len: u32,
    },
    #[error(
        "num_pages is {num_pages} ({num_pages} x {page_size} tokens), but one sequence of max_model_len \
         ({max_model_len}) tokens needs {needed} pages; enlarge the KV cache or lower max_model_len"
    )]
    TooFewPages {
        num_pages: u32,
        page_size: u32,
        max_model_len: u32,
        needed: u32,
    },
    #[error("EOS token id {id} is out of range; it must be in 0..{vocab_size}")]
    EosOutOfRange { id: i32, vocab_size: u32 },
}

/// A request that cannot be served as it stands.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[allow(missing_docs)]
pub enum RequestError {
    #[error("the prompt is empty; it needs at least one token")]
    EmptyPrompt,
    #[error(
        "the prompt has {num_prompt_tokens} tokens, but the context holds {max_model_len} with at least one of \
         output; the prompt may have at most {most} tokens", most = max_model_len - 1
    )]
    PromptTooLong {
        num_prompt_tokens: usize,
        max_model_len: u32,
    },
    #[error("{field} holds token id {id} at index {index}; ids must be in 0..{vocab_size}")]
    TokenOutOfRange {
        field: &'static str,
        id: i32,
        index: usize,
        vocab_size: u32,
    },
    #[error("max_tokens is 0; it must be at least 1")]
    NoOutput,
    #[error("min_tokens is {min_tokens}; it must be at most max_tokens ({max_tokens})")]
    MinAboveMax { min_tokens: u32, max_tokens: u32 },
    #[error("request id {id} is already in use; ids must be unique among live requests")]
    DuplicateId { id: u64 },
    #[error("{num_waiting} requests are waiting, the limit is {max_waiting}; try again later")]
    QueueFull {
        num_waiting: usize,
        max_waiting: u32,
    },
}

impl RequestError {
    /// The field at fault, where it is one field.
    pub fn param(&self) -> Option<&'static str> {
        match self {
            Self::EmptyPrompt | Self::PromptTooLong { .. } => Some("prompt"),
            Self::TokenOutOfRange { field, .. } => Some(field),
            Self::NoOutput => Some("max_tokens"),
            Self::MinAboveMax { .. } => Some("min_tokens"),
            Self::DuplicateId { .. } => Some("request_id"),
            Self::QueueFull { .. } => None,
        }
    }

    /// A short word for the kind of error.
    pub fn code(&self) -> &'static str {
        match self {
            Self::EmptyPrompt => "empty_prompt",
            Self::PromptTooLong { .. } => "context_length_exceeded",
            Self::TokenOutOfRange { .. } => "token_out_of_range",
            Self::NoOutput | Self::MinAboveMax { .. } => "invalid_value",
            Self::DuplicateId { .. } => "duplicate_request_id",
            Self::QueueFull { .. } => "queue_full",
        }
    }
}

/// A plan that could not be made.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[allow(missing_docs)]
pub enum PlanError {
    #[error("step {} is still in flight; commit or revert it before planning the next", .step.0)]
    StepInFlight { step: StepId },
    #[error("draft_lens has {got} entries; it must have one a slot, {expected}")]
    DraftLens { got: usize, expected: u32 },
    #[error("draft_lens is {got} at slot {slot}; it must not be negative")]
    NegativeDraftLen { slot: usize, got: i32 },
    #[error("the step's buffer has {got} words; it must have at least {expected}")]
    BufferTooSmall { got: usize, expected: usize },
}

/// A verdict that does not fit its step. The step stays committable.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[allow(missing_docs)]
pub enum VerdictError {
    #[error("num_emitted has {got} rows; the step has {expected}")]
    NumRows { got: usize, expected: usize },
    #[error("tokens holds {got} ids; {rows} rows of width {width} need {expected}", expected = rows * width)]
    NumTokens {
        got: usize,
        rows: usize,
        width: usize,
    },
    #[error(
        "row {row} emitted {got} tokens; it must emit {least}..={most} (drafts + 1 where it samples, else 0)"
    )]
    NumEmitted {
        row: usize,
        got: i32,
        least: i32,
        most: i32,
    },
    #[error("row {row} emitted {got} tokens, but tokens is only {width} wide")]
    Width { row: usize, got: i32, width: usize },
    #[error("row {row} emitted token id {id}; ids must be in 0..{vocab_size}")]
    TokenOutOfRange {
        row: usize,
        id: i32,
        vocab_size: u32,
    },
    #[error("step {} is not the one in flight; it belongs to another scheduler", .step.0)]
    ForeignStep { step: StepId },
}

/// A failed commit hands the step back, so that it can be committed again or reverted.
#[derive(Debug)]
pub struct CommitError {
    /// The step, untouched.
    pub step: PlannedStep,
    /// What was wrong with the verdict.
    pub error: VerdictError,
}

impl std::fmt::Display for CommitError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.error.fmt(f)
    }
}

impl std::error::Error for CommitError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.error)
    }
}
