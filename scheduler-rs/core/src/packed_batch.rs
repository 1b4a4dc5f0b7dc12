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

/// The buffer cut into its sections, in the order of the buffer.
struct Sections<'a> {
    slots: &'a mut [i32],
    qo_indptr: &'a mut [i32],
    num_draft_tokens: &'a mut [i32],
    num_computed_tokens: &'a mut [i32],
    kv_len: &'a mut [i32],
    paged_kv_indptr: &'a mut [i32],
    paged_kv_last_page_len: &'a mut [i32],
    output_pos: &'a mut [i32],
    next_prompt_token: &'a mut [i32],
    sample_indptr: &'a mut [i32],
    sample_rows: &'a mut [i32],
    sample_reqs: &'a mut [i32],
    token_ids: &'a mut [i32],
    positions: &'a mut [i32],
    slot_mapping: &'a mut [i32],
    token_reqs: &'a mut [i32],
    new_page_slots: &'a mut [i32],
    new_page_indices: &'a mut [i32],
    new_page_ids: &'a mut [i32],
    admitted_slots: &'a mut [i32],
    admitted_ids: &'a mut [i32],
}

impl<'a> Sections<'a> {
    /// Cuts `rest`, which starts behind the header, and writes the sections' offsets and the step's words.
    fn cut(header: &mut [i32], mut rest: &'a mut [i32], counts: &Counts) -> Self {
        let lens = section_lens(counts);
        let (mut index, mut next) = (0, HEADER_WORDS);
        let mut take = || {
            let len = lens[index] as usize;
            let aligned = len.next_multiple_of(ALIGN_WORDS as usize);
            let (section, behind) = std::mem::take(&mut rest).split_at_mut(aligned);
            rest = behind;
            header[SECTION_OFFSETS_AT + index] = next as i32;
            index += 1;
            next += aligned;
            header[header::NUM_WORDS] = next as i32;
            &mut section[..len]
        };
        Self {
            slots: take(),
            qo_indptr: take(),
            num_draft_tokens: take(),
            num_computed_tokens: take(),
            kv_len: take(),
            paged_kv_indptr: take(),
            paged_kv_last_page_len: take(),
            output_pos: take(),
            next_prompt_token: take(),
            sample_indptr: take(),
            sample_rows: take(),
            sample_reqs: take(),
            token_ids: take(),
            positions: take(),
            slot_mapping: take(),
            token_reqs: take(),
            new_page_slots: take(),
            new_page_indices: take(),
            new_page_ids: take(),
            admitted_slots: take(),
            admitted_ids: take(),
        }
    }
}

/// The most of any row.
#[derive(Default)]
struct Most {
    q_len: u32,
    kv_len: u32,
    drafts: u32,
}

/// Writes `step` into `out`, which holds at least `SchedulerConfig::slot_words` words. `request_of` finds a row's
/// request.
pub(crate) fn pack<'r>(
    step: &PlannedStep,
    page_size: u32,
    request_of: impl Fn(&Row) -> &'r Request,
    out: &mut [i32],
) {
    let (header, rest) = out.split_at_mut(HEADER_WORDS);
    header.fill(0);
    let mut sections = Sections::cut(header, rest, &step.counts());
    let most = pack_rows(&step.rows, page_size, &mut sections);
    pack_tokens(step, page_size, &request_of, &mut sections);
    pack_samples(step, &mut sections);
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
    ];
    for (at, word) in words {
        header[at] = word;
    }
}

/// Entries a row, a few sections at a time: short loops without branches, whose pointers fit into the registers.
fn pack_rows(rows: &[Row], page_size: u32, out: &mut Sections) -> Most {
    let mut most = Most::default();
    let sections = (out.slots.iter_mut().zip(&mut *out.num_draft_tokens))
        .zip(&mut *out.num_computed_tokens)
        .zip(&mut *out.output_pos);
    for ((((slot, drafts), computed), output_pos), row) in sections.zip(rows) {
        *slot = row.slot.0 as i32;
        *drafts = row.num_drafts as i32;
        *computed = row.num_computed_tokens as i32;
        *output_pos = row.output_pos as i32;
        most.q_len = most.q_len.max(row.num_tokens);
        most.kv_len = most.kv_len.max(row.kv_len());
        most.drafts = most.drafts.max(row.num_drafts);
    }
    out.paged_kv_indptr[0] = 0;
    let mut num_pages = 0;
    let sections = (out.kv_len.iter_mut().zip(&mut *out.paged_kv_last_page_len))
        .zip(&mut out.paged_kv_indptr[1..]);
    for (((kv_len, last_page_len), page_end), row) in sections.zip(rows) {
        let (pages, last) = row.pages(page_size);
        num_pages += pages;
        *kv_len = row.kv_len() as i32;
        *last_page_len = last as i32;
        *page_end = num_pages as i32;
    }
    (out.qo_indptr[0], out.sample_indptr[0]) = (0, 0);
    let (mut num_tokens, mut num_samples) = (0, 0);
    let sections = out.qo_indptr[1..].iter_mut();
    for ((token_end, sample_end), row) in sections.zip(&mut out.sample_indptr[1..]).zip(rows) {
        num_tokens += row.num_tokens;
        num_samples += row.num_samples();
        *token_end = num_tokens as i32;
        *sample_end = num_samples as i32;
    }
    most
}

/// Entries a token, and the prompt's next token behind each row.
fn pack_tokens<'r>(
    step: &PlannedStep,
    page_size: u32,
    request_of: impl Fn(&Row) -> &'r Request,
    out: &mut Sections,
) {
    let mut start = 0;
    let (decode, prefill) = step.rows.split_at(step.num_decode_reqs);
    for (i, row) in (0..).zip(decode) {
        // Rows are short, and loops of a known length are unrolled.
        match row.num_tokens {
            1 => pack_decode_tokens::<1>(i, row, page_size, start, out),
            2 => pack_decode_tokens::<2>(i, row, page_size, start, out),
            3 => pack_decode_tokens::<3>(i, row, page_size, start, out),
            4 => pack_decode_tokens::<4>(i, row, page_size, start, out),
            5 => pack_decode_tokens::<5>(i, row, page_size, start, out),
            6 => pack_decode_tokens::<6>(i, row, page_size, start, out),
            _ => pack_decode_tokens::<0>(i, row, page_size, start, out),
        }
        map_further_pages(row, &request_of, page_size, start, out);
        start += row.num_tokens as usize;
    }
    out.next_prompt_token[..decode.len()].fill(-1);
    for (i, row) in (decode.len()..).zip(prefill) {
        let tokens = start..start + row.num_tokens as usize;
        let known = &request_of(row).tokens[row.num_computed_tokens as usize..];
        out.token_ids[tokens.clone()].copy_from_slice(&known[..tokens.len()]);
        out.next_prompt_token[i] = known.get(tokens.len()).map_or(-1, |&token| token);
        map_tokens(i as i32, row, page_size, start, tokens.len(), out);
        map_further_pages(row, &request_of, page_size, start, out);
        start = tokens.end;
    }
}

/// The known token and the drafts' places of a row of N tokens; N = 0: of any number.
#[inline(always)]
fn pack_decode_tokens<const N: usize>(
    i: i32,
    row: &Row,
    page_size: u32,
    start: usize,
    out: &mut Sections,
) {
    let num_tokens = if N > 0 { N } else { row.num_tokens as usize };
    let ids = &mut out.token_ids[start..][..num_tokens];
    ids.fill(-1);
    ids[0] = row.last_token;
    map_tokens(i, row, page_size, start, num_tokens, out);
}

/// Row, position and place of each token, as far as they lie in the first two pages that are not full.
#[inline(always)]
fn map_tokens(
    i: i32,
    row: &Row,
    page_size: u32,
    start: usize,
    num_tokens: usize,
    out: &mut Sections,
) {
    let first = row.num_computed_tokens as i32;
    let num_open = first - (row.num_full_pages * page_size) as i32;
    let left = page_size as i32 - num_open;
    let place = row.open_places[0] as i32 + num_open;
    // Where the second page would have to begin for the tokens in it to follow on from those in the first.
    let second = row.open_places[1] as i32 - left;
    out.token_reqs[start..][..num_tokens].fill(i);
    for (j, position) in (0..).zip(&mut out.positions[start..][..num_tokens]) {
        *position = first + j;
    }
    for (j, slot) in (0..).zip(&mut out.slot_mapping[start..][..num_tokens]) {
        *slot = j + if j < left { place } else { second };
    }
}

/// Places of a row's tokens beyond the first two pages that are not full.
#[inline(always)]
fn map_further_pages<'r>(
    row: &Row,
    request_of: impl Fn(&Row) -> &'r Request,
    page_size: u32,
    start: usize,
    out: &mut Sections,
) {
    let num_before = (row.num_full_pages + 2) * page_size - row.num_computed_tokens;
    if row.num_tokens <= num_before {
        return;
    }
    let tokens = start + num_before as usize..start + row.num_tokens as usize;
    let pages = &request_of(row).pages[row.num_full_pages as usize + 2..];
    let parts = out.slot_mapping[tokens].chunks_mut(page_size as usize);
    for (part, page) in parts.zip(pages) {
        for (slot, place) in part.iter_mut().zip(page.id().0 * page_size..) {
            *slot = place as i32;
        }
    }
}

/// Entries a sampled token: all tokens of the decode rows, then the last one of each prefill row that ends its prompt.
fn pack_samples(step: &PlannedStep, out: &mut Sections) {
    let num_decode = step.num_decode_tokens as usize;
    for (token, row) in (0..).zip(&mut out.sample_rows[..num_decode]) {
        *row = token;
    }
    out.sample_reqs[..num_decode].copy_from_slice(&out.token_reqs[..num_decode]);
    let mut at = num_decode;
    for (i, row) in step.rows.iter().enumerate().skip(step.num_decode_reqs) {
        if row.samples {
            out.sample_rows[at] = out.qo_indptr[i + 1] - 1;
            out.sample_reqs[at] = i as i32;
            at += 1;
        }
    }
}

/// New page-table entries and admitted requests.
fn pack_pages(step: &PlannedStep, out: &mut Sections) {
    for (i, new) in step.new_pages.iter().enumerate() {
        out.new_page_slots[i] = new.slot.0 as i32;
        out.new_page_indices[i] = new.index as i32;
        out.new_page_ids[i] = new.page.0 as i32;
    }
    for (i, admitted) in step.admitted.iter().enumerate() {
        out.admitted_slots[i] = admitted.slot.0 as i32;
        out.admitted_ids[2 * i] = admitted.id.0 as u32 as i32;
        out.admitted_ids[2 * i + 1] = (admitted.id.0 >> 32) as u32 as i32;
    }
}
