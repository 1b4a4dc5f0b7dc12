//! Full pages of computed tokens, found again by what they hold.
//!
//! A page's hash is a keyed BLAKE3 over its parent's hash and its token ids, cut to 128 bits; the root is keyed with
//! the request's salt. The hash may cover the token after the page too, for drafters whose entries depend on it. So
//! equal hashes mean equal beginnings under the same salt, and nobody without the key can construct a collision. Only full pages of committed tokens enter; pages without an owner stay until they are the
//! least recently used ones and somebody needs a page. Sizes are in pages.

use crate::ids::{PageId, RequestKey};
use crate::page_pool::{Page, PagePool};
use hashbrown::HashTable;
use hashbrown::hash_table::Entry;
use std::collections::HashSet;

/// Identity of a page's content and of everything before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PageHash([u64; 2]);

impl PageHash {
    fn cut(hash: &blake3::Hash) -> Self {
        let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| hash.as_bytes()[at + i]));
        Self([word(0), word(8)])
    }

    /// For the index: the hash is uniform already.
    fn key(&self) -> u64 {
        self.0[0]
    }
}

/// Hashes pages. Token ids take three bytes where the vocabulary allows, so that 16 of them and the parent's hash
/// are one BLAKE3 block.
#[derive(Debug)]
struct PageHasher {
    page_key: [u8; 32],
    root_key: [u8; 32],
    id_bytes: usize,
    /// Tokens that are hashed of a page: its own, and the next one where that counts.
    num_tokens: usize,
    /// Bytes that are hashed: the parent's hash and the token ids.
    input_len: usize,
    buffer: Vec<u8>,
}

impl PageHasher {
    fn new(config: &crate::SchedulerConfig) -> Self {
        let id_bytes = if config.vocab_size <= 1 << 24 { 3 } else { 4 };
        let num_tokens =
            config.page_size as usize + usize::from(config.page_hash_covers_next_token);
        Self {
            page_key: blake3::derive_key("sonar prefix cache: page", &config.cache_key),
            root_key: blake3::derive_key("sonar prefix cache: root", &config.cache_key),
            id_bytes,
            num_tokens,
            input_len: 16 + num_tokens * id_bytes,
            buffer: Vec::new(),
        }
    }

    fn root(&self, epoch: u64, salt: Option<&[u8]>) -> PageHash {
        let mut hasher = blake3::Hasher::new_keyed(&self.root_key);
        hasher.update(&epoch.to_le_bytes());
        hasher.update(&[u8::from(salt.is_some())]);
        hasher.update(salt.unwrap_or_default());
        PageHash::cut(&hasher.finalize())
    }

    fn page(&mut self, parent: PageHash, tokens: &[i32]) -> PageHash {
        let mut buffer = std::mem::take(&mut self.buffer);
        buffer.clear();
        self.write(parent, tokens, &mut buffer);
        let hash = self.finish(&buffer);
        self.buffer = buffer;
        hash
    }

    /// Appends what is hashed of a page.
    fn write(&self, parent: PageHash, tokens: &[i32], out: &mut Vec<u8>) {
        out.extend_from_slice(&parent.0[0].to_le_bytes());
        out.extend_from_slice(&parent.0[1].to_le_bytes());
        if self.id_bytes == 4 {
            out.extend(tokens.iter().flat_map(|token| token.to_le_bytes()));
            return;
        }
        let (fours, rest) = tokens.as_chunks::<4>();
        for four in fours {
            let word = four
                .iter()
                .rfold(0, |word, &token| word << 24 | token as u32 as u128);
            out.extend_from_slice(&word.to_le_bytes()[..12]);
        }
        for token in rest {
            out.extend_from_slice(&token.to_le_bytes()[..3]);
        }
    }

    fn finish(&self, input: &[u8]) -> PageHash {
        PageHash::cut(&blake3::keyed_hash(&self.page_key, input))
    }
}

/// The chain of hashes of one request's full pages, as far as they have been hashed.
#[derive(Debug, Default)]
pub struct HashChain {
    /// Hash of page `num_hashed - 1`.
    last: PageHash,
    num_hashed: usize,
    epoch: u64,
    /// Hashes of the first pages, for looking them up; pages filled by decoding are only in `last`.
    first: Vec<PageHash>,
}

impl HashChain {
    /// Appends the hash of the next page.
    pub(crate) fn push(&mut self, hash: PageHash) {
        self.last = hash;
        self.num_hashed += 1;
    }
}

/// The page pool together with the index of what its pages hold.
#[derive(Debug)]
pub struct PrefixCache {
    pool: PagePool<PageHash>,
    /// The retained pages by their content, which the pool knows: an entry is a page id alone, so that the table is small.
    index: HashTable<PageId>,
    hasher: PageHasher,
    page_size: usize,
    /// Pages to be entered.
    filled: Vec<(PageHash, PageId)>,
    /// Pages to be hashed and entered, and what is hashed of each.
    gathered: Vec<(RequestKey, PageId)>,
    unhashed: Vec<u8>,
    enabled: bool,
    epoch: u64,
}

impl PrefixCache {
    /// An empty cache over `num_pages` free pages.
    pub fn new(config: &crate::SchedulerConfig) -> Self {
        let num_entries = if config.enable_prefix_caching {
            config.num_pages
        } else {
            0
        };
        Self {
            pool: PagePool::new(config.num_pages),
            index: HashTable::with_capacity(num_entries as usize),
            hasher: PageHasher::new(config),
            page_size: config.page_size as usize,
            filled: Vec::new(),
            gathered: Vec::new(),
            unhashed: Vec::new(),
            enabled: config.enable_prefix_caching,
            epoch: 0,
        }
    }

    /// The pages and their states.
    pub fn pool(&self) -> &PagePool<PageHash> {
        &self.pool
    }

    /// Pages that can be had at once: free ones and idle ones.
    pub fn num_available(&self) -> u32 {
        self.pool.num_free() + self.pool.num_idle()
    }

    /// A page for new content. Takes the least recently used idle page, which leaves the index, when none is free.
    pub fn allocate(&mut self) -> Option<Page> {
        if self.pool.num_free() == 0 {
            let oldest = self.pool.least_recently_used()?;
            if let Some(hash) = self.pool.content(oldest)
                && let Ok(entry) = self.index.find_entry(hash.key(), |&id| id == oldest)
            {
                entry.remove();
            }
            self.pool.forget(oldest);
        }
        self.pool.allocate()
    }

    /// Gives a reference back.
    pub fn release(&mut self, page: Page) {
        self.pool.release(page);
    }

    /// Gives a sequence's pages back, last one first, so that the end of a prefix is evicted before its beginning.
    pub fn release_from(&mut self, pages: &mut Vec<Page>, first: usize) {
        while pages.len() > first
            && let Some(page) = pages.pop()
        {
            self.pool.release(page);
        }
    }

    /// Pages at the start of `tokens` that the index holds, in order, into `found`. At least the last token is left
    /// out, so that there is something to compute logits from.
    pub fn find(
        &mut self,
        chain: &mut HashChain,
        salt: Option<&[u8]>,
        tokens: &[i32],
        found: &mut Vec<PageId>,
    ) {
        found.clear();
        if !self.enabled {
            return;
        }
        self.renew(chain);
        for page in 0..(tokens.len() - 1) / self.page_size {
            let hash = self.hash(chain, salt, tokens, page);
            let holds = |&id: &PageId| self.pool.content(id) == Some(hash);
            match self.index.find(hash.key(), holds) {
                Some(&id) => found.push(id),
                None => break,
            }
        }
    }

    /// One more reference to a page that [`Self::find`] returned.
    pub fn share(&mut self, id: PageId) -> Option<Page> {
        self.pool.share(id)
    }

    /// Takes note of the full pages `range` of a sequence, whose tokens are all computed and committed, for
    /// [`Self::insert_filled`]; `owner` is named there again. A sequence has a token more than have been computed.
    ///
    /// A step fills pages of many sequences. What is hashed is copied together first, so that the cache misses of all
    /// of them overlap, and so do those of the index later.
    pub(crate) fn fill(
        &mut self,
        owner: RequestKey,
        chain: &mut HashChain,
        salt: Option<&[u8]>,
        tokens: &[i32],
        pages: &[Page],
        range: std::ops::Range<usize>,
    ) {
        // A chain of an earlier epoch belongs to a request that was running when the cache was reset.
        if !self.enabled || chain.epoch != self.epoch {
            return;
        }
        for page in range.clone() {
            let id = pages[page].id();
            let is_next = page > 0 && chain.num_hashed == page;
            let content = self.content(tokens, page);
            if is_next && page + 1 == range.end {
                self.hasher.write(chain.last, content, &mut self.unhashed);
                self.gathered.push((owner, id));
            } else if is_next {
                chain.push(self.hasher.page(chain.last, content));
                self.filled.push((chain.last, id));
            } else {
                let hash = self.hash(chain, salt, tokens, page);
                self.filled.push((hash, id));
            }
        }
    }

    /// Enters the pages that were filled. Content that is already in the index under another page stays there alone.
    /// `store` receives each hash that belongs at the end of its owner's chain. The owners still hold the pages.
    pub(crate) fn insert_filled(&mut self, mut store: impl FnMut(RequestKey, PageHash)) {
        for ((owner, id), input) in self
            .gathered
            .drain(..)
            .zip(self.unhashed.chunks_exact(self.hasher.input_len))
        {
            let hash = self.hasher.finish(input);
            store(owner, hash);
            self.filled.push((hash, id));
        }
        self.unhashed.clear();
        for (hash, id) in self.filled.drain(..) {
            let pool = &self.pool;
            let content = |&id: &PageId| pool.content(id).unwrap_or_default();
            let entry = self.index.entry(
                hash.key(),
                |other| content(other) == hash,
                |other| content(other).key(),
            );
            if let Entry::Vacant(entry) = entry {
                entry.insert(id);
                self.pool.retain(id, hash);
            }
        }
    }

    /// Forgets all content. Later requests share nothing with earlier ones, also not with those that run on.
    pub fn reset(&mut self) {
        for id in self.index.drain() {
            self.pool.forget(id);
        }
        self.epoch += 1;
    }

    /// Pages in the index.
    pub fn num_indexed(&self) -> usize {
        self.index.len()
    }

    /// Whether index, hashes and retentions name the same pages.
    pub fn is_consistent(&self) -> bool {
        let retained = (0..self.pool.num_pages())
            .filter(|&id| self.pool.is_retained(PageId(id)))
            .count();
        let mut distinct = HashSet::new();
        retained == self.index.len()
            && self.index.iter().all(|&id| {
                let content = self.pool.content(id);
                content.is_some_and(|hash| distinct.insert(hash.0))
            })
    }

    fn renew(&self, chain: &mut HashChain) {
        if chain.epoch != self.epoch {
            chain.first.clear();
            chain.num_hashed = 0;
            chain.epoch = self.epoch;
        }
    }

    /// What is hashed of page `page`.
    fn content<'t>(&self, tokens: &'t [i32], page: usize) -> &'t [i32] {
        &tokens[page * self.page_size..][..self.hasher.num_tokens]
    }

    /// The hash of page `page`, hashing the pages up to it that have not been hashed yet.
    fn hash(
        &mut self,
        chain: &mut HashChain,
        salt: Option<&[u8]>,
        tokens: &[i32],
        page: usize,
    ) -> PageHash {
        while chain.first.len() <= page {
            let next = chain.first.len();
            let parent = match chain.first.last() {
                Some(&hash) => hash,
                None => self.hasher.root(self.epoch, salt),
            };
            let content = self.content(tokens, next);
            chain.first.push(self.hasher.page(parent, content));
        }
        (chain.last, chain.num_hashed) = (chain.first[page], page + 1);
        chain.last
    }
}
