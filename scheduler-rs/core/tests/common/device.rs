//! A device that believes nothing but the packed buffer: it keeps its own page table and remembers, for every position
//! of every page, which history was written there.

use sonar_scheduler::SchedulerConfig;
use sonar_scheduler::packed_batch::{header, read_section, section};
use std::collections::HashMap;

/// What a request looks like from outside.
#[derive(Clone, Debug)]
pub struct Known {
    pub tokens: Vec<i32>,
    pub num_prompt: usize,
    pub salt: Option<Vec<u8>>,
}

/// Identity of a history under a salt.
fn history(tokens: &[i32], salt: Option<&[u8]>) -> u64 {
    let mut hash = salt.map_or(1, |salt| {
        salt.iter()
            .fold(7, |hash, &byte| hash * 31 + u64::from(byte))
    });
    for &token in tokens {
        hash = (hash.rotate_left(9) ^ (token as u64 + 3)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    }
    hash
}

pub struct Device {
    page_size: usize,
    page_table: Vec<Vec<i32>>,
    written: HashMap<(i32, usize), u64>,
    /// What a draft head has written, which depends on the next token too; None: its pages may be stale.
    written_by_head: Option<HashMap<(i32, usize), u64>>,
    request_of_slot: HashMap<i32, u64>,
}

/// One row of a packed step, as the device sees it.
#[derive(Debug)]
pub struct SeenRow {
    pub request: u64,
    pub num_tokens: usize,
    pub num_drafts: usize,
    pub num_computed: usize,
    pub samples: bool,
    pub is_decode: bool,
}

impl Device {
    pub fn new(config: &SchedulerConfig) -> Self {
        Self {
            page_size: config.page_size as usize,
            page_table: vec![
                vec![-1; config.max_pages_per_seq() as usize];
                config.max_num_seqs as usize
            ],
            written: HashMap::new(),
            written_by_head: config.page_hash_covers_next_token.then(HashMap::new),
            request_of_slot: HashMap::new(),
        }
    }

    /// Checks a packed step against what is known of its requests and runs it: writes every token's history, drafts
    /// included, to its place. `draft` gives the token of a draft position.
    pub fn run(
        &mut self,
        words: &[i32],
        known: &HashMap<u64, Known>,
        mut draft: impl FnMut() -> i32,
    ) -> Vec<SeenRow> {
        let section = |index| read_section(words, index).expect("a packed step");
        self.take_new_entries(&section);
        let num_reqs = words[header::NUM_REQS] as usize;
        let qo_indptr = section(section::QO_INDPTR);
        let kv_indptr = section(section::PAGED_KV_INDPTR);
        let sample_indptr = section(section::SAMPLE_INDPTR);
        assert_eq!(qo_indptr[num_reqs], words[header::NUM_TOKENS]);
        assert_eq!(sample_indptr[num_reqs], words[header::NUM_SAMPLE_ROWS]);
        let mut rows = Vec::new();
        for row in 0..num_reqs {
            let slot = section(section::SLOTS)[row];
            let request = self.request_of_slot[&slot];
            let known = &known[&request];
            let (start, end) = (qo_indptr[row] as usize, qo_indptr[row + 1] as usize);
            let num_drafts = section(section::NUM_DRAFT_TOKENS)[row] as usize;
            let num_computed = section(section::NUM_COMPUTED_TOKENS)[row] as usize;
            let kv_len = section(section::KV_LEN)[row] as usize;
            let num_known = end - start - num_drafts;
            assert_eq!(kv_len, num_computed + end - start);
            assert_eq!(
                (kv_indptr[row + 1] - kv_indptr[row]) as usize,
                kv_len.div_ceil(self.page_size)
            );
            assert_eq!(
                section(section::PAGED_KV_LAST_PAGE_LEN)[row] as usize,
                (kv_len - 1) % self.page_size + 1
            );
            assert_eq!(
                section(section::OUTPUT_POS)[row] as usize,
                known.tokens.len() - known.num_prompt
            );
            self.check_computed(slot, known, num_computed);
            let mut tokens = known.tokens[..num_computed].to_vec();
            for at in start..end {
                let position = section(section::POSITIONS)[at] as usize;
                assert_eq!(position, num_computed + at - start);
                assert_eq!(section(section::TOKEN_REQS)[at] as usize, row);
                let packed = section(section::TOKEN_IDS)[at];
                let is_draft = at - start >= num_known;
                let expected = if is_draft { -1 } else { known.tokens[position] };
                assert_eq!(packed, expected, "token {at} of the batch");
                tokens.push(if is_draft { draft() } else { packed });
                let page = self.page_table[slot as usize][position / self.page_size];
                let place = section(section::SLOT_MAPPING)[at];
                assert_eq!(
                    place as usize,
                    page as usize * self.page_size + position % self.page_size
                );
                self.written.insert(
                    (page, position % self.page_size),
                    history(&tokens, known.salt.as_deref()),
                );
                self.write_by_head(slot, known, &known.tokens, position);
            }
            let samples = num_computed + num_known == known.tokens.len();
            let sampled = &section(section::SAMPLE_ROWS)
                [sample_indptr[row] as usize..sample_indptr[row + 1] as usize];
            let expected: Vec<i32> = if samples {
                (end - num_drafts - 1..end).map(|at| at as i32).collect()
            } else {
                Vec::new()
            };
            assert_eq!(sampled, expected);
            let next = section(section::NEXT_PROMPT_TOKEN)[row];
            assert_eq!(
                next,
                if samples {
                    -1
                } else {
                    known.tokens[num_computed + num_known]
                }
            );
            rows.push(SeenRow {
                request,
                num_tokens: end - start,
                num_drafts,
                num_computed,
                samples,
                is_decode: row < words[header::NUM_DECODE_REQS] as usize,
            });
        }
        rows
    }

    /// New page-table entries and newly occupied slots. No entry comes twice.
    fn take_new_entries<'w>(&mut self, section: &impl Fn(usize) -> &'w [i32]) {
        let (slots, indices) = (
            section(section::NEW_PAGE_SLOTS),
            section(section::NEW_PAGE_INDICES),
        );
        let mut places: Vec<_> = slots.iter().zip(indices).collect();
        places.sort();
        places.dedup();
        assert_eq!(
            places.len(),
            slots.len(),
            "a page-table entry is written twice in one step"
        );
        for ((&slot, &index), &page) in slots
            .iter()
            .zip(indices)
            .zip(section(section::NEW_PAGE_IDS))
        {
            self.page_table[slot as usize][index as usize] = page;
        }
        for (&slot, id) in section(section::ADMITTED_SLOTS)
            .iter()
            .zip(section(section::ADMITTED_IDS).chunks(2))
        {
            let id = u64::from(id[0] as u32) | u64::from(id[1] as u32) << 32;
            self.request_of_slot.retain(|_, other| *other != id);
            self.request_of_slot.insert(slot, id);
        }
    }

    /// Every position that counts as computed holds this very history: no rejected draft, no other request's page.
    fn check_computed(&self, slot: i32, known: &Known, num_computed: usize) {
        for position in 0..num_computed {
            let page = self.page_table[slot as usize][position / self.page_size];
            let held = self.written.get(&(page, position % self.page_size));
            let expected = history(&known.tokens[..=position], known.salt.as_deref());
            assert_eq!(
                held,
                Some(&expected),
                "position {position} of slot {slot} lies in page {page}"
            );
            if let Some(written) = &self.written_by_head {
                let held = written.get(&(page, position % self.page_size));
                let expected = history(&known.tokens[..=position + 1], known.salt.as_deref());
                assert_eq!(
                    held,
                    Some(&expected),
                    "the head's position {position} of slot {slot} lies in page {page}"
                );
            }
        }
    }

    /// The head's entry at `position`: of the tokens up to the next one, or junk where that is not known.
    fn write_by_head(&mut self, slot: i32, known: &Known, tokens: &[i32], position: usize) {
        let page = self.page_table[slot as usize][position / self.page_size];
        if let Some(written) = &mut self.written_by_head {
            let entry = match tokens.get(..=position + 1) {
                Some(tokens) => history(tokens, known.salt.as_deref()),
                None => 0,
            };
            written.insert((page, position % self.page_size), entry);
        }
    }

    /// What verification accepted was really drafted: the accepted positions hold the history with these tokens. A
    /// head then runs over all emitted tokens, one position earlier. Takes each row's emitted tokens.
    pub fn accept<'a>(
        &mut self,
        known: &HashMap<u64, Known>,
        emitted: impl Iterator<Item = (u64, &'a [i32])>,
    ) {
        for (request, emitted) in emitted {
            let Some((_, drafts)) = emitted.split_last() else {
                continue;
            };
            let slot = *self
                .request_of_slot
                .iter()
                .find(|(_, id)| **id == request)
                .expect("it is running")
                .0;
            let known = &known[&request];
            let mut tokens = known.tokens.clone();
            let all = [&tokens, emitted].concat();
            for position in known.tokens.len() - 1..all.len() - 1 {
                self.write_by_head(slot, known, &all, position);
            }
            for &draft in drafts {
                let position = tokens.len();
                tokens.push(draft);
                let page = self.page_table[slot as usize][position / self.page_size];
                self.written.insert(
                    (page, position % self.page_size),
                    history(&tokens, known.salt.as_deref()),
                );
            }
        }
    }
}
