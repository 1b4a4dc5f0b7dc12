//! A request: what was asked for, checked once, and the account of its tokens while it lives.

use crate::config::SchedulerConfig;
use crate::error::RequestError;
use crate::ids::{RequestId, Slot};
use crate::ngram::NgramIndex;
use crate::page_pool::Page;
use crate::prefix_cache::HashChain;

/// Output tokens for which memory is set aside at admission.
const MAX_RESERVED_TOKENS: u32 = 16_384;

/// What a caller asks for.
#[derive(Clone, Debug)]
pub struct NewRequest {
    /// Unique among live requests.
    pub id: RequestId,
    /// Prompt token ids, at least one, at most `max_model_len - 1`.
    pub prompt: Vec<i32>,
    /// Most output tokens; None: up to the context limit, which bounds it in any case.
    pub max_tokens: Option<u32>,
    /// Output tokens before a stop token counts.
    pub min_tokens: u32,
    /// Further tokens that end the sequence.
    pub stop_token_ids: Vec<i32>,
    /// Whether the configured EOS tokens are ordinary tokens for this request.
    pub ignore_eos: bool,
    /// Lower runs earlier; first come, first served within a priority.
    pub priority: i64,
    /// Prefixes are shared only under the same salt.
    pub cache_salt: Option<Vec<u8>>,
    /// Most drafts a step; 0: never; None: the configured number.
    pub num_speculative_tokens: Option<u32>,
}

impl NewRequest {
    /// A request with a prompt and defaults elsewhere.
    pub fn new(id: u64, prompt: Vec<i32>) -> Self {
        Self {
            id: RequestId(id),
            prompt,
            max_tokens: None,
            min_tokens: 0,
            stop_token_ids: Vec::new(),
            ignore_eos: false,
            priority: 0,
            cache_salt: None,
            num_speculative_tokens: None,
        }
    }

    /// Checks the request against the configuration. Needs no scheduler, so any thread can do it.
    ///
    /// # Errors
    /// The first thing that is wrong, with the way out.
    pub fn validate(self, config: &SchedulerConfig) -> Result<ValidRequest, RequestError> {
        if self.prompt.is_empty() {
            return Err(RequestError::EmptyPrompt);
        }
        if self.prompt.len() >= config.max_model_len as usize {
            return Err(RequestError::PromptTooLong {
                num_prompt_tokens: self.prompt.len(),
                max_model_len: config.max_model_len,
            });
        }
        check_ids("prompt", &self.prompt, config.vocab_size)?;
        check_ids("stop_token_ids", &self.stop_token_ids, config.vocab_size)?;
        match self.max_tokens {
            Some(0) => Err(RequestError::NoOutput),
            Some(max_tokens) if self.min_tokens > max_tokens => Err(RequestError::MinAboveMax {
                min_tokens: self.min_tokens,
                max_tokens,
            }),
            _ => Ok(ValidRequest(self)),
        }
    }
}

fn check_ids(field: &'static str, ids: &[i32], vocab_size: u32) -> Result<(), RequestError> {
    match ids.iter().position(|&id| id < 0 || id as u32 >= vocab_size) {
        Some(index) => Err(RequestError::TokenOutOfRange {
            field,
            id: ids[index],
            index,
            vocab_size,
        }),
        None => Ok(()),
    }
}

/// A request that has passed [`NewRequest::validate`].
#[derive(Debug)]
pub struct ValidRequest(NewRequest);

impl ValidRequest {
    /// The caller's id.
    pub fn id(&self) -> RequestId {
        self.0.id
    }
}

/// Order of service: priority, then arrival. Lower runs earlier, higher is preempted earlier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Rank {
    pub(crate) priority: i64,
    pub(crate) arrival: u64,
}

/// A live request. Waiting: no slot, no pages, nothing computed. Running: a slot and pages for its tokens.
///
/// A step reads and writes every running request, so what it needs lies close together; the rest is behind `cold`.
#[derive(Debug)]
#[repr(align(64))]
pub(crate) struct Request {
    pub(crate) id: RequestId,
    pub(crate) rank: Rank,
    /// Set while running.
    pub(crate) slot: Option<Slot>,
    /// Has ended with the step being committed.
    pub(crate) is_finished: bool,
    /// Ends at the commit or revert of the step in flight.
    pub(crate) is_aborted: bool,
    /// Has sampled since it entered its slot, so that all but its last token are computed.
    pub(crate) is_decoding: bool,
    /// No token ends it.
    pub(crate) never_stops: bool,
    /// Prompt, then output.
    pub(crate) tokens: Vec<i32>,
    pub(crate) num_prompt_tokens: u32,
    /// Prompt and most output, within the context.
    pub(crate) max_len: u32,
    /// Tokens whose keys and values lie in `pages`; below `tokens.len()`, never counts a rejected draft.
    pub(crate) num_computed_tokens: u32,
    /// The last one of `tokens`.
    pub(crate) last_token: i32,
    pub(crate) max_drafts: u16,
    pub(crate) num_preemptions: u16,
    pub(crate) pages: Vec<Page>,
    /// Pages that the computed tokens fill: `num_computed_tokens / page_size`.
    pub(crate) num_full_pages: u32,
    /// Places of the first position of the first two pages that are not full, as far as there are any: where a step's
    /// tokens go.
    pub(crate) open_places: [u32; 2],
    /// Prompt tokens found in the prefix cache at first admission.
    pub(crate) num_cached_tokens: u32,
    pub(crate) cold: Box<Cold>,
}

/// What most steps of a request do not touch.
#[derive(Debug)]
pub(crate) struct Cold {
    pub(crate) chain: HashChain,
    pub(crate) stop: StopTokens,
    pub(crate) cache_salt: Option<Box<[u8]>>,
    /// Stop tokens count once the sequence is longer than this.
    pub(crate) min_len: u32,
    pub(crate) was_admitted: bool,
    pub(crate) ngram: Option<Box<NgramIndex>>,
}

/// Two cache lines.
const _: () = assert!(size_of::<Option<Request>>() <= 128);

/// Which tokens end a request.
#[derive(Debug)]
pub(crate) struct StopTokens {
    ids: Box<[i32]>,
    ignore_eos: bool,
}

/// What a token does to a sequence that it would end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stop {
    Eos,
    User(i32),
}

impl StopTokens {
    fn is_empty(&self, eos_token_ids: &[i32]) -> bool {
        self.ids.is_empty() && (self.ignore_eos || eos_token_ids.is_empty())
    }

    pub(crate) fn check(&self, token: i32, eos_token_ids: &[i32]) -> Option<Stop> {
        if !self.ignore_eos && eos_token_ids.contains(&token) {
            return Some(Stop::Eos);
        }
        self.ids.contains(&token).then_some(Stop::User(token))
    }
}

impl Request {
    pub(crate) fn new(request: ValidRequest, arrival: u64, config: &SchedulerConfig) -> Self {
        let NewRequest {
            id,
            prompt,
            max_tokens,
            min_tokens,
            priority,
            ..
        } = request.0;
        let num_prompt_tokens = prompt.len() as u32;
        let room = config.max_model_len - num_prompt_tokens;
        let stop = StopTokens {
            ids: request.0.stop_token_ids.into(),
            ignore_eos: request.0.ignore_eos,
        };
        let most_drafts = config.num_speculative_tokens;
        let most_drafts = request
            .0
            .num_speculative_tokens
            .map_or(most_drafts, |most| most.min(most_drafts));
        let last_token = prompt.last().copied().unwrap_or_default();
        Self {
            id,
            rank: Rank { priority, arrival },
            slot: None,
            is_finished: false,
            is_aborted: false,
            is_decoding: false,
            never_stops: stop.is_empty(&config.eos_token_ids),
            tokens: prompt,
            num_prompt_tokens,
            max_len: num_prompt_tokens + max_tokens.unwrap_or(room).min(room),
            num_computed_tokens: 0,
            last_token,
            max_drafts: most_drafts.min(u32::from(u16::MAX)) as u16,
            num_preemptions: 0,
            pages: Vec::new(),
            num_full_pages: 0,
            open_places: [0; 2],
            num_cached_tokens: 0,
            cold: Box::new(Cold {
                chain: HashChain::default(),
                stop,
                cache_salt: request.0.cache_salt.map(Into::into),
                min_len: num_prompt_tokens + min_tokens.min(room),
                was_admitted: false,
                ngram: None,
            }),
        }
    }

    /// Prompt and output tokens so far.
    pub(crate) fn len(&self) -> u32 {
        self.tokens.len() as u32
    }

    /// Appends the first `num_tokens` of `path`.
    #[inline]
    pub(crate) fn append(&mut self, path: &[i32], num_tokens: u32) {
        let len = self.tokens.len() + num_tokens as usize;
        self.tokens.extend_from_slice(path);
        self.tokens.truncate(len);
        if let Some(&last) = self.tokens.last() {
            self.last_token = last;
        }
    }

    /// Makes room for what the request can grow to, so that decoding moves no memory; a very long one grows in pieces.
    /// Appending needs room for a step's path beyond.
    pub(crate) fn reserve(&mut self, config: &SchedulerConfig) {
        let page_size = config.page_size;
        let path_len = config.num_speculative_tokens as usize + 1;
        let max_len = self.max_len.min(self.len() + MAX_RESERVED_TOKENS);
        let num_pages = max_len.div_ceil(page_size) as usize + 1;
        self.tokens
            .reserve(max_len as usize + path_len - self.tokens.len());
        self.pages
            .reserve(num_pages.saturating_sub(self.pages.len()));
    }

    /// Looks the open places up again, after `pages` or `num_full_pages` have changed.
    pub(crate) fn find_open_places(&mut self, page_size: u32) {
        let open = self.pages.iter().skip(self.num_full_pages as usize);
        for (place, page) in self.open_places.iter_mut().zip(open) {
            *place = page.id().0 * page_size;
        }
    }

    /// Known tokens that are still to be computed, at least 1 between steps.
    pub(crate) fn num_uncomputed_tokens(&self) -> u32 {
        self.len() - self.num_computed_tokens
    }

    /// Most drafts the request's own limits allow: each draft may be emitted, and one token more.
    pub(crate) fn draft_limit(&self) -> u32 {
        u32::from(self.max_drafts).min((self.max_len - self.len()).saturating_sub(1))
    }
}
