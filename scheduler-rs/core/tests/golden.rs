//! The packed arrays of known situations, word for word. Pages hold 4 positions; page 0 is handed out first.

mod common;

use common::{config, plan, submit};
use sonar_scheduler::packed_batch::{
    MAGIC, NUM_SECTIONS, SECTION_OFFSETS_AT, header, read_section,
};
use sonar_scheduler::{Events, NewRequest, PlannedStep, Scheduler, SchedulerConfig, Verdict};

const NAMES: [&str; NUM_SECTIONS] = [
    "slots",
    "qo_indptr",
    "num_draft_tokens",
    "num_computed_tokens",
    "kv_len",
    "paged_kv_indptr",
    "paged_kv_last_page_len",
    "output_pos",
    "next_prompt_token",
    "sample_indptr",
    "sample_rows",
    "sample_reqs",
    "token_ids",
    "positions",
    "slot_mapping",
    "token_reqs",
    "new_page_slots",
    "new_page_indices",
    "new_page_ids",
    "admitted_slots",
    "admitted_ids",
];

struct Bench {
    scheduler: Scheduler,
    words: Vec<i32>,
}

impl Bench {
    fn new(config: SchedulerConfig) -> Self {
        let words = vec![0; config.slot_words()];
        Self {
            scheduler: Scheduler::new(config).expect("valid"),
            words,
        }
    }

    fn submit(&mut self, id: u64, prompt: impl IntoIterator<Item = i32>) {
        self.submit_request(NewRequest::new(id, prompt.into_iter().collect()));
    }

    fn submit_request(&mut self, request: NewRequest) {
        submit(&mut self.scheduler, request);
    }

    fn plan(&mut self, draft_lens: Option<&[i32]>) -> PlannedStep {
        plan(&mut self.scheduler, draft_lens, &mut self.words)
    }

    /// Commits with the tokens of each row; `[]` where a row does not sample.
    fn commit(&mut self, step: PlannedStep, rows: &[&[i32]]) -> Events {
        let width = rows.iter().map(|row| row.len()).max().unwrap_or(0);
        let num_emitted: Vec<i32> = rows.iter().map(|row| row.len() as i32).collect();
        let mut tokens = vec![-1; rows.len() * width];
        for (to, row) in tokens.chunks_mut(width.max(1)).zip(rows) {
            to[..row.len()].copy_from_slice(row);
        }
        let mut events = Events::default();
        self.scheduler
            .commit(
                step,
                &Verdict::chain(&num_emitted, &tokens, width),
                &mut events,
            )
            .expect("it fits");
        events
    }

    /// The sections as text; empty ones are left out.
    fn packed(&self) -> Vec<String> {
        let lines = (0..NUM_SECTIONS).filter_map(|i| {
            let section = read_section(&self.words, i).expect("a packed step");
            (!section.is_empty()).then(|| format!("{} {section:?}", NAMES[i]))
        });
        lines.collect()
    }
}

#[test]
fn a_prefill_that_fits_samples_its_last_token_and_brings_pages_for_all_tokens() {
    let mut bench = Bench::new(config());
    bench.submit((1 << 32) | 7, 10..16);
    let step = bench.plan(None);
    assert_eq!(
        bench.packed(),
        [
            "slots [0]",
            "qo_indptr [0, 6]",
            "num_draft_tokens [0]",
            "num_computed_tokens [0]",
            "kv_len [6]",
            "paged_kv_indptr [0, 2]",
            "paged_kv_last_page_len [2]",
            "output_pos [0]",
            "next_prompt_token [-1]",
            "sample_indptr [0, 1]",
            "sample_rows [5]",
            "sample_reqs [0]",
            "token_ids [10, 11, 12, 13, 14, 15]",
            "positions [0, 1, 2, 3, 4, 5]",
            "slot_mapping [0, 1, 2, 3, 4, 5]",
            "token_reqs [0, 0, 0, 0, 0, 0]",
            "new_page_slots [0, 0]",
            "new_page_indices [0, 1]",
            "new_page_ids [0, 1]",
            "admitted_slots [0]",
            "admitted_ids [7, 1]",
        ]
    );
    bench.scheduler.revert(step);
}

#[test]
fn a_chunked_prefill_runs_behind_a_decode_row_and_knows_the_token_after_its_chunk() {
    let mut bench = Bench::new(SchedulerConfig {
        max_num_batched_tokens: 6,
        ..config()
    });
    bench.submit(1, 10..13);
    let step = bench.plan(None);
    bench.commit(step, &[&[50]]);
    bench.submit(2, 20..29);
    let step = bench.plan(None);
    assert_eq!(
        bench.packed(),
        [
            "slots [0, 1]",
            "qo_indptr [0, 1, 6]",
            "num_draft_tokens [0, 0]",
            "num_computed_tokens [3, 0]",
            "kv_len [4, 5]",
            "paged_kv_indptr [0, 1, 3]",
            "paged_kv_last_page_len [4, 1]",
            "output_pos [1, 0]",
            "next_prompt_token [-1, 25]",
            "sample_indptr [0, 1, 1]",
            "sample_rows [0]",
            "sample_reqs [0]",
            "token_ids [50, 20, 21, 22, 23, 24]",
            "positions [3, 0, 1, 2, 3, 4]",
            "slot_mapping [3, 4, 5, 6, 7, 8]",
            "token_reqs [0, 1, 1, 1, 1, 1]",
            "new_page_slots [1, 1, 1]",
            "new_page_indices [0, 1, 2]",
            "new_page_ids [1, 2, 3]",
            "admitted_slots [1]",
            "admitted_ids [2, 0]",
        ]
    );
    bench.commit(step, &[&[51], &[]]);
    let step = bench.plan(None);
    assert_eq!(
        bench.packed(),
        [
            "slots [0, 1]",
            "qo_indptr [0, 1, 5]",
            "num_draft_tokens [0, 0]",
            "num_computed_tokens [4, 5]",
            "kv_len [5, 9]",
            "paged_kv_indptr [0, 2, 5]",
            "paged_kv_last_page_len [1, 1]",
            "output_pos [2, 0]",
            "next_prompt_token [-1, -1]",
            "sample_indptr [0, 1, 2]",
            "sample_rows [0, 4]",
            "sample_reqs [0, 1]",
            "token_ids [51, 25, 26, 27, 28]",
            "positions [4, 5, 6, 7, 8]",
            "slot_mapping [16, 9, 10, 11, 12]",
            "token_reqs [0, 1, 1, 1, 1]",
            "new_page_slots [0]",
            "new_page_indices [1]",
            "new_page_ids [4]",
        ]
    );
    bench.scheduler.revert(step);
}

#[test]
fn decode_rows_with_drafts_leave_their_places_open_and_sample_every_token() {
    let mut bench = Bench::new(SchedulerConfig {
        num_speculative_tokens: 3,
        ..config()
    });
    bench.submit(1, 10..13);
    bench.submit(2, 20..22);
    let step = bench.plan(Some(&[3; 4]));
    bench.commit(step, &[&[50], &[60]]);
    let step = bench.plan(Some(&[3, 1, 0, 0]));
    assert_eq!(
        bench.packed(),
        [
            "slots [0, 1]",
            "qo_indptr [0, 4, 6]",
            "num_draft_tokens [3, 1]",
            "num_computed_tokens [3, 2]",
            "kv_len [7, 4]",
            "paged_kv_indptr [0, 2, 3]",
            "paged_kv_last_page_len [3, 4]",
            "output_pos [1, 1]",
            "next_prompt_token [-1, -1]",
            "sample_indptr [0, 4, 6]",
            "sample_rows [0, 1, 2, 3, 4, 5]",
            "sample_reqs [0, 0, 0, 0, 1, 1]",
            "token_ids [50, -1, -1, -1, 60, -1]",
            "positions [3, 4, 5, 6, 2, 3]",
            "slot_mapping [3, 8, 9, 10, 6, 7]",
            "token_reqs [0, 0, 0, 0, 1, 1]",
            "new_page_slots [0, 1]",
            "new_page_indices [1, 1]",
            "new_page_ids [2, 3]",
        ]
    );
    bench.commit(step, &[&[51, 52], &[61, 62]]);
    let step = bench.plan(Some(&[3, 0, 0, 0]));
    assert_eq!(
        bench.packed(),
        [
            "slots [0, 1]",
            "qo_indptr [0, 4, 5]",
            "num_draft_tokens [3, 0]",
            "num_computed_tokens [5, 4]",
            "kv_len [9, 5]",
            "paged_kv_indptr [0, 3, 5]",
            "paged_kv_last_page_len [1, 1]",
            "output_pos [3, 3]",
            "next_prompt_token [-1, -1]",
            "sample_indptr [0, 4, 5]",
            "sample_rows [0, 1, 2, 3, 4]",
            "sample_reqs [0, 0, 0, 0, 1]",
            "token_ids [52, -1, -1, -1, 62]",
            "positions [5, 6, 7, 8, 4]",
            "slot_mapping [9, 10, 11, 16, 12]",
            "token_reqs [0, 0, 0, 0, 1]",
            "new_page_slots [0]",
            "new_page_indices [2]",
            "new_page_ids [4]",
        ]
    );
    bench.scheduler.revert(step);
}

#[test]
fn a_prefix_hit_starts_behind_the_cached_pages_and_shares_them() {
    let mut bench = Bench::new(config());
    bench.submit(1, 10..20);
    let step = bench.plan(None);
    bench.commit(step, &[&[50]]);
    bench.submit(2, 10..18);
    let step = bench.plan(None);
    assert_eq!(
        bench.packed(),
        [
            "slots [0, 1]",
            "qo_indptr [0, 1, 5]",
            "num_draft_tokens [0, 0]",
            "num_computed_tokens [10, 4]",
            "kv_len [11, 8]",
            "paged_kv_indptr [0, 3, 5]",
            "paged_kv_last_page_len [3, 4]",
            "output_pos [1, 0]",
            "next_prompt_token [-1, -1]",
            "sample_indptr [0, 1, 2]",
            "sample_rows [0, 4]",
            "sample_reqs [0, 1]",
            "token_ids [50, 14, 15, 16, 17]",
            "positions [10, 4, 5, 6, 7]",
            "slot_mapping [10, 12, 13, 14, 15]",
            "token_reqs [0, 1, 1, 1, 1]",
            "new_page_slots [1, 1]",
            "new_page_indices [0, 1]",
            "new_page_ids [0, 3]",
            "admitted_slots [1]",
            "admitted_ids [2, 0]",
        ]
    );
    bench.scheduler.revert(step);
}

#[test]
fn a_preempted_request_comes_back_with_its_output_and_what_the_cache_still_holds() {
    let mut bench = Bench::new(SchedulerConfig {
        num_pages: 5,
        max_model_len: 20,
        ..config()
    });
    bench.submit(1, 10..17);
    bench.submit(2, 20..27);
    let step = bench.plan(None);
    bench.commit(step, &[&[50], &[60]]);
    let step = bench.plan(None);
    bench.commit(step, &[&[51], &[61]]);
    // Request 1 takes the last free page, request 2 gets none and waits with its two output tokens.
    let step = bench.plan(None);
    assert_eq!(
        bench.packed(),
        [
            "slots [0]",
            "qo_indptr [0, 1]",
            "num_draft_tokens [0]",
            "num_computed_tokens [8]",
            "kv_len [9]",
            "paged_kv_indptr [0, 3]",
            "paged_kv_last_page_len [1]",
            "output_pos [2]",
            "next_prompt_token [-1]",
            "sample_indptr [0, 1]",
            "sample_rows [0]",
            "sample_reqs [0]",
            "token_ids [51]",
            "positions [8]",
            "slot_mapping [16]",
            "token_reqs [0]",
            "new_page_slots [0]",
            "new_page_indices [2]",
            "new_page_ids [4]",
        ]
    );
    bench.commit(step, &[&[52]]);
    bench.scheduler.abort(sonar_scheduler::RequestId(1));
    let step = bench.plan(None);
    assert_eq!(
        bench.packed(),
        [
            "slots [0]",
            "qo_indptr [0, 1]",
            "num_draft_tokens [0]",
            "num_computed_tokens [8]",
            "kv_len [9]",
            "paged_kv_indptr [0, 3]",
            "paged_kv_last_page_len [1]",
            "output_pos [2]",
            "next_prompt_token [-1]",
            "sample_indptr [0, 1]",
            "sample_rows [0]",
            "sample_reqs [0]",
            "token_ids [61]",
            "positions [8]",
            "slot_mapping [16]",
            "token_reqs [0]",
            "new_page_slots [0, 0, 0]",
            "new_page_indices [0, 1, 2]",
            "new_page_ids [2, 3, 4]",
            "admitted_slots [0]",
            "admitted_ids [2, 0]",
        ]
    );
    let events = bench.commit(step, &[&[62]]);
    assert_eq!(events.num_preemptions, [0, 1]);
}

#[test]
fn the_header_counts_what_the_sections_hold() {
    let mut bench = Bench::new(SchedulerConfig {
        num_speculative_tokens: 2,
        ..config()
    });
    bench.submit(1, 10..13);
    let step = bench.plan(Some(&[2; 4]));
    bench.commit(step, &[&[50]]);
    let step = bench.plan(Some(&[2; 4]));
    let words = &bench.words;
    assert_eq!(words[header::MAGIC], MAGIC);
    let counts: Vec<i32> = words[header::STEP_ID_LO..=header::NUM_WORDS].to_vec();
    //               id    rows  tokens drafts q  kv samples  new admitted most words
    assert_eq!(counts, [2, 0, 1, 1, 3, 3, 2, 3, 6, 3, 1, 1, 0, 2, 368]);
    assert!((0..NUM_SECTIONS).all(|i| words[SECTION_OFFSETS_AT + i] % 16 == 0));
    bench.scheduler.revert(step);
}
