//! One step as one flat i32 buffer, in FlashInfer's shapes: a header of 64 words, then the sections in a fixed order,
//! each starting at a multiple of 16 words (64 bytes). `step_buffers.py` mirrors the layout and a test pins both.
//!
//! Words of a section beyond its length are undefined. Page-table rows live on the device by slot: only new entries
//! are packed, so a step costs the same whatever the length of its sequences.

use crate::request::Request;
use crate::scheduler::{PlannedStep, Row};

/// Words of the header.
pub const HEADER_WORDS: usize = 64;
/// Header words from here on hold each section's word offset.
pub const SECTION_OFFSETS_AT: usize = 32;
/// First word of every packed step: "SNR1".
pub const MAGIC: i32 = 0x534E_5231;
/// Sections of a packed step.
pub const NUM_SECTIONS: usize = 21;
const ALIGN_WORDS: u64 = 16;

/// Where each header field stands.
#[allow(missing_docs)]
pub mod header {
    pub const MAGIC: usize = 0;
    pub const STEP_ID_LO: usize = 1;
    pub const STEP_ID_HI: usize = 2;
    pub const NUM_REQS: usize = 3;
    pub const NUM_DECODE_REQS: usize = 4;
    pub const NUM_TOKENS: usize = 5;
    pub const NUM_DECODE_TOKENS: usize = 6;
    pub const NUM_DRAFT_TOKENS: usize = 7;
    pub const MAX_Q_LEN: usize = 8;
    pub const MAX_KV_LEN: usize = 9;
    pub const NUM_SAMPLE_ROWS: usize = 10;
    pub const NUM_SAMPLING_REQS: usize = 11;
    pub const NUM_NEW_PAGES: usize = 12;
    pub const NUM_ADMITTED: usize = 13;
    pub const MAX_DRAFT_TOKENS: usize = 14;
    pub const NUM_WORDS: usize = 15;
}

/// The sections in the order of the buffer.
#[allow(missing_docs)]
pub mod section {
    pub const SLOTS: usize = 0;
    pub const QO_INDPTR: usize = 1;
    pub const NUM_DRAFT_TOKENS: usize = 2;
    pub const NUM_COMPUTED_TOKENS: usize = 3;
    pub const KV_LEN: usize = 4;
    pub const PAGED_KV_INDPTR: usize = 5;
    pub const PAGED_KV_LAST_PAGE_LEN: usize = 6;
    pub const OUTPUT_POS: usize = 7;
    pub const NEXT_PROMPT_TOKEN: usize = 8;
    pub const SAMPLE_INDPTR: usize = 9;
    pub const SAMPLE_ROWS: usize = 10;
    pub const SAMPLE_REQS: usize = 11;
    pub const TOKEN_IDS: usize = 12;
    pub const POSITIONS: usize = 13;
    pub const SLOT_MAPPING: usize = 14;
    pub const TOKEN_REQS: usize = 15;
    pub const NEW_PAGE_SLOTS: usize = 16;
    pub const NEW_PAGE_INDICES: usize = 17;
    pub const NEW_PAGE_IDS: usize = 18;
    pub const ADMITTED_SLOTS: usize = 19;
    pub const ADMITTED_IDS: usize = 20;
}

/// Everything the lengths of the sections depend on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Rows of the batch.
    pub num_reqs: u64,
    /// Tokens of the batch, drafts included.
    pub num_tokens: u64,
    /// Tokens whose logits are needed.
    pub num_sample_rows: u64,
    /// New page-table entries.
    pub num_new_pages: u64,
    /// Requests that enter a slot.
    pub num_admitted: u64,
}

fn section_lens(counts: &Counts) -> [u64; NUM_SECTIONS] {
    let (r, t, s) = (counts.num_reqs, counts.num_tokens, counts.num_sample_rows);
    let (p, a) = (counts.num_new_pages, counts.num_admitted);
    [
        r,
        r + 1,
        r,
        r,
        r,
        r + 1,
        r,
        r,
        r,
        r + 1,
        s,
        s,
        t,
        t,
        t,
        t,
        p,
        p,
        p,
        a,
        2 * a,
    ]
}

/// Words of a packed step with these counts.
pub fn num_words(counts: &Counts) -> u64 {
    section_lens(counts)
        .iter()
        .map(|len| len.next_multiple_of(ALIGN_WORDS))
        .sum::<u64>()
        + HEADER_WORDS as u64
}

/// Reads a section of a packed step. None when `words` is not a packed step.
pub fn read_section(words: &[i32], index: usize) -> Option<&[i32]> {
    let word = |at: usize| words.get(at).and_then(|&word| u64::try_from(word).ok());
    if words.first() != Some(&MAGIC) || index >= NUM_SECTIONS {
        return None;
    }
    let counts = Counts {
        num_reqs: word(header::NUM_REQS)?,
        num_tokens: word(header::NUM_TOKENS)?,
        num_sample_rows: word(header::NUM_SAMPLE_ROWS)?,
        num_new_pages: word(header::NUM_NEW_PAGES)?,
        num_admitted: word(header::NUM_ADMITTED)?,
    };
    let start = word(SECTION_OFFSETS_AT + index)? as usize;
    words.get(start..start + section_lens(&counts)[index] as usize)
}

/// The buffer cut into its sections.
struct Sections<'a> {
    header: &'a mut [i32],
    rest: &'a mut [i32],
    next: usize,
}

impl<'a> Sections<'a> {
    fn take(&mut self, index: usize, len: usize) -> &'a mut [i32] {
        let aligned = len.next_multiple_of(ALIGN_WORDS as usize);
        let (section, rest) = std::mem::take(&mut self.rest).split_at_mut(aligned);
        self.rest = rest;
        self.header[SECTION_OFFSETS_AT + index] = self.next as i32;
        self.next += aligned;
        &mut section[..len]
    }
}

/// Writes `step` into `out`, which holds at least `SchedulerConfig::slot_words` words. `request_of` finds a row's
/// request.
pub(crate) fn pack<'r>(
    step: &PlannedStep,
    page_size: u32,
    request_of: impl Fn(&Row) -> &'r Request + Copy,
    out: &mut [i32],
) {
    let (header, rest) = out.split_at_mut(HEADER_WORDS);
    header.fill(0);
    let mut sections = Sections {
        header,
        rest,
        next: HEADER_WORDS,
    };
    let most = pack_rows(step, page_size, request_of, &mut sections);
    pack_tokens(step, page_size, request_of, &mut sections);
    pack_pages(step, &mut sections);
    let words = [
        (header::MAGIC, MAGIC),
        (header::STEP_ID_LO, step.id().0 as u32 as i32),
        (header::STEP_ID_HI, (step.id().0 >> 32) as u32 as i32),
        (header::NUM_REQS, step.rows.len() as i32),
        (header::NUM_DECODE_REQS, step.num_decode_reqs as i32),
        (header::NUM_TOKENS, step.num_tokens as i32),
        (header::NUM_DECODE_TOKENS, step.num_decode_tokens as i32),
        (header::NUM_DRAFT_TOKENS, step.num_draft_tokens as i32),
        (header::MAX_Q_LEN, most.q_len as i32),
        (header::MAX_KV_LEN, most.kv_len as i32),
        (header::NUM_SAMPLE_ROWS, step.num_sample_rows as i32),
        (header::NUM_SAMPLING_REQS, step.num_sampling_reqs as i32),
        (header::NUM_NEW_PAGES, step.new_pages.len() as i32),
        (header::NUM_ADMITTED, step.admitted.len() as i32),
        (header::MAX_DRAFT_TOKENS, most.drafts as i32),
        (header::NUM_WORDS, sections.next as i32),
    ];
    for (at, word) in words {
        sections.header[at] = word;
    }
}

#[derive(Default)]
struct Most {
    q_len: u32,
    kv_len: u32,
    drafts: u32,
}

/// Sections with an entry a row.
fn pack_rows<'r>(
    step: &PlannedStep,
    page_size: u32,
    request_of: impl Fn(&Row) -> &'r Request,
    sections: &mut Sections,
) -> Most {
    let n = step.rows.len();
    let slots = sections.take(section::SLOTS, n);
    let qo_indptr = sections.take(section::QO_INDPTR, n + 1);
    let num_draft_tokens = sections.take(section::NUM_DRAFT_TOKENS, n);
    let num_computed_tokens = sections.take(section::NUM_COMPUTED_TOKENS, n);
    let kv_lens = sections.take(section::KV_LEN, n);
    let paged_kv_indptr = sections.take(section::PAGED_KV_INDPTR, n + 1);
    let last_page_len = sections.take(section::PAGED_KV_LAST_PAGE_LEN, n);
    let output_pos = sections.take(section::OUTPUT_POS, n);
    let next_prompt_token = sections.take(section::NEXT_PROMPT_TOKEN, n);
    let sample_indptr = sections.take(section::SAMPLE_INDPTR, n + 1);
    let (mut most, mut num_tokens, mut num_pages, mut num_samples) = (Most::default(), 0, 0, 0);
    (qo_indptr[0], paged_kv_indptr[0], sample_indptr[0]) = (0, 0, 0);
    for (i, row) in step.rows.iter().enumerate() {
        let request = request_of(row);
        let kv_len = request.num_computed_tokens + row.num_tokens;
        let pages = kv_len.div_ceil(page_size);
        num_tokens += row.num_tokens;
        num_pages += pages;
        num_samples += row.num_samples();
        slots[i] = row.slot.0 as i32;
        qo_indptr[i + 1] = num_tokens as i32;
        num_draft_tokens[i] = row.num_drafts as i32;
        num_computed_tokens[i] = request.num_computed_tokens as i32;
        kv_lens[i] = kv_len as i32;
        paged_kv_indptr[i + 1] = num_pages as i32;
        last_page_len[i] = (kv_len - (pages - 1) * page_size) as i32;
        output_pos[i] = (request.len() - request.num_prompt_tokens) as i32;
        next_prompt_token[i] = if row.samples {
            -1
        } else {
            request.tokens.get(kv_len as usize).copied().unwrap_or(-1)
        };
        sample_indptr[i + 1] = num_samples as i32;
        most.q_len = most.q_len.max(row.num_tokens);
        most.kv_len = most.kv_len.max(kv_len);
        most.drafts = most.drafts.max(row.num_drafts);
    }
    most
}

/// Sections with an entry a token or a sampled token.
fn pack_tokens<'r>(
    step: &PlannedStep,
    page_size: u32,
    request_of: impl Fn(&Row) -> &'r Request,
    sections: &mut Sections,
) {
    let (num_tokens, num_samples) = (step.num_tokens as usize, step.num_sample_rows as usize);
    let sample_rows = sections.take(section::SAMPLE_ROWS, num_samples);
    let sample_reqs = sections.take(section::SAMPLE_REQS, num_samples);
    let token_ids = sections.take(section::TOKEN_IDS, num_tokens);
    let positions = sections.take(section::POSITIONS, num_tokens);
    let slot_mapping = sections.take(section::SLOT_MAPPING, num_tokens);
    let token_reqs = sections.take(section::TOKEN_REQS, num_tokens);
    let (mut start, mut sample) = (0, 0);
    for (i, row) in step.rows.iter().enumerate() {
        let request = request_of(row);
        let first = request.num_computed_tokens;
        let end = start + row.num_tokens as usize;
        let known = (row.num_tokens - row.num_drafts) as usize;
        token_ids[start..start + known]
            .copy_from_slice(&request.tokens[first as usize..first as usize + known]);
        token_ids[start + known..end].fill(-1);
        token_reqs[start..end].fill(i as i32);
        let (mut page, mut offset) = (first / page_size, first % page_size);
        for (j, at) in (start..end).enumerate() {
            positions[at] = first as i32 + j as i32;
            slot_mapping[at] = (request.pages[page as usize].id().0 * page_size + offset) as i32;
            offset += 1;
            if offset == page_size {
                (page, offset) = (page + 1, 0);
            }
        }
        for token in end - row.num_samples() as usize..end {
            sample_rows[sample] = token as i32;
            sample_reqs[sample] = i as i32;
            sample += 1;
        }
        start = end;
    }
}

/// Sections of new page-table entries and of admitted requests.
fn pack_pages(step: &PlannedStep, sections: &mut Sections) {
    let n = step.new_pages.len();
    let slots = sections.take(section::NEW_PAGE_SLOTS, n);
    let indices = sections.take(section::NEW_PAGE_INDICES, n);
    let ids = sections.take(section::NEW_PAGE_IDS, n);
    for (i, new) in step.new_pages.iter().enumerate() {
        (slots[i], indices[i], ids[i]) = (new.slot.0 as i32, new.index as i32, new.page.0 as i32);
    }
    let admitted_slots = sections.take(section::ADMITTED_SLOTS, step.admitted.len());
    let admitted_ids = sections.take(section::ADMITTED_IDS, 2 * step.admitted.len());
    for (i, admitted) in step.admitted.iter().enumerate() {
        admitted_slots[i] = admitted.slot.0 as i32;
        admitted_ids[2 * i] = admitted.id.0 as u32 as i32;
        admitted_ids[2 * i + 1] = (admitted.id.0 >> 32) as u32 as i32;
    }
}
