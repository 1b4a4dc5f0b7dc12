//! Any small configuration, any request and any operation, over a vocabulary of 2.

use proptest::prelude::*;
use sonar_scheduler::SchedulerConfig;

pub const VOCAB: u32 = 2;

#[derive(Clone, Debug)]
pub struct Ask {
    pub prompt: Vec<i32>,
    pub max_tokens: Option<u32>,
    pub min_tokens: u32,
    pub stop_token_ids: Vec<i32>,
    pub ignore_eos: bool,
    pub priority: i64,
    pub salt: Option<Vec<u8>>,
    pub drafts: Option<u32>,
}

#[derive(Clone, Debug)]
pub enum Op {
    Submit(Ask),
    Step { seed: u64 },
    Revert { seed: u64 },
    BadVerdict { seed: u64 },
    Abort { pick: usize },
    AbortInFlight { seed: u64, pick: usize },
    ResetCache,
}

pub fn any_config() -> impl Strategy<Value = SchedulerConfig> {
    (
        1..5u32,
        4..28u32,
        0..6u32,
        1..5u32,
        1..14u32,
        0..4u32,
        any::<[bool; 4]>(),
    )
        .prop_map(
            |(
                page_size,
                max_model_len,
                spare_pages,
                seqs,
                budget,
                drafts,
                [caching, mixed, eos, covers_next],
            )| SchedulerConfig {
                page_size,
                num_pages: max_model_len.div_ceil(page_size) + spare_pages,
                max_num_seqs: seqs,
                max_num_batched_tokens: budget,
                max_model_len,
                vocab_size: VOCAB,
                max_waiting: 6,
                enable_prefix_caching: caching,
                page_hash_covers_next_token: covers_next,
                num_speculative_tokens: drafts.min(max_model_len - 1),
                speculate_in_mixed_batches: mixed,
                eos_token_ids: if eos { vec![1] } else { vec![] },
                cache_key: [3; 32],
            },
        )
}

fn any_ask() -> impl Strategy<Value = Ask> {
    (
        proptest::collection::vec(0..2i32, 1..20),
        proptest::option::of(1..12u32),
        0..4u32,
        prop_oneof![4 => Just(vec![]), 1 => Just(vec![0]), 1 => Just(vec![1])],
        any::<bool>(),
        0..3i64,
        proptest::option::weighted(0.3, (0..2u8).prop_map(|byte| vec![byte])),
        proptest::option::of(0..4u32),
    )
        .prop_map(
            |(
                prompt,
                max_tokens,
                min_tokens,
                stop_token_ids,
                ignore_eos,
                priority,
                salt,
                drafts,
            )| Ask {
                prompt,
                max_tokens,
                min_tokens: min_tokens.min(max_tokens.unwrap_or(u32::MAX)),
                stop_token_ids,
                ignore_eos,
                priority,
                salt,
                drafts,
            },
        )
}

pub fn any_op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => any_ask().prop_map(Op::Submit),
        10 => any::<u64>().prop_map(|seed| Op::Step { seed }),
        1 => any::<u64>().prop_map(|seed| Op::Revert { seed }),
        1 => any::<u64>().prop_map(|seed| Op::BadVerdict { seed }),
        1 => any::<usize>().prop_map(|pick| Op::Abort { pick }),
        1 => (any::<u64>(), any::<usize>()).prop_map(|(seed, pick)| Op::AbortInFlight { seed, pick }),
        1 => Just(Op::ResetCache),
    ]
}
