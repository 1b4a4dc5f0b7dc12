//! The pages of the KV cache: a free list, reference counts, and the idle pages in order of last use.
//!
//! A [`Page`] is one reference to one page. It can be neither cloned nor copied and [`PagePool::release`] takes it by
//! value, so a page cannot be given back twice. Every operation is O(1).
//!
//! Each page is in exactly one state: *free* (on the free list), *in use* (one or more references), or *idle* (no
//! reference, but retained for the prefix cache). A page that is released after step n may be handed out in step
//! n + 1: both steps run in order on one device stream, so what step n still writes is written before step n + 1 reads
//! or writes the page.

use crate::ids::PageId;

/// One reference to a page. Dropping it leaks the page until the pool is dropped; give it to `release` instead.
#[must_use = "a page that is dropped is never free again; release it"]
#[derive(Debug, PartialEq, Eq)]
pub struct Page(PageId);

impl Page {
    /// The page this reference is to.
    pub fn id(&self) -> PageId {
        self.0
    }
}

#[derive(Clone, Copy, Debug)]
struct Meta<C> {
    ref_count: u32,
    prev: u32,
    next: u32,
    retained: bool,
    content: C,
}

/// All pages and their states. C is what the prefix cache says a retained page holds.
#[derive(Debug)]
pub struct PagePool<C> {
    /// One a page, then the sentinel of the idle list: its `next` is the least recently used page.
    meta: Vec<Meta<C>>,
    free: Vec<PageId>,
    num_idle: u32,
}

impl<C: Copy + Default> PagePool<C> {
    /// A pool of `num_pages` free pages; low ids are handed out first.
    pub fn new(num_pages: u32) -> Self {
        let unlinked = Meta {
            ref_count: 0,
            prev: num_pages,
            next: num_pages,
            retained: false,
            content: C::default(),
        };
        Self {
            meta: vec![unlinked; num_pages as usize + 1],
            free: (0..num_pages).rev().map(PageId).collect(),
            num_idle: 0,
        }
    }

    /// Pages in all.
    pub fn num_pages(&self) -> u32 {
        self.sentinel()
    }

    /// Pages on the free list.
    pub fn num_free(&self) -> u32 {
        self.free.len() as u32
    }

    /// Retained pages without an owner.
    pub fn num_idle(&self) -> u32 {
        self.num_idle
    }

    /// Owners of a page.
    pub fn ref_count(&self, id: PageId) -> u32 {
        self.meta[id.0 as usize].ref_count
    }

    /// Whether the prefix cache retains a page.
    pub fn is_retained(&self, id: PageId) -> bool {
        self.meta[id.0 as usize].retained
    }

    /// What a retained page holds.
    pub fn content(&self, id: PageId) -> Option<C> {
        let meta = &self.meta[id.0 as usize];
        meta.retained.then_some(meta.content)
    }

    /// A page from the free list, with one reference; None when the list is empty.
    pub fn allocate(&mut self) -> Option<Page> {
        let id = self.free.pop()?;
        self.meta[id.0 as usize].ref_count = 1;
        Some(Page(id))
    }

    /// One more reference to a retained page; an idle page comes into use again. None when the page is not retained.
    pub fn share(&mut self, id: PageId) -> Option<Page> {
        let meta = self.meta[id.0 as usize];
        if !meta.retained {
            return None;
        }
        if meta.ref_count == 0 {
            self.unlink(id.0);
        }
        self.meta[id.0 as usize].ref_count += 1;
        Some(Page(id))
    }

    /// Gives one reference back. The last one makes a retained page idle (most recently used) and any other free.
    pub fn release(&mut self, page: Page) {
        let id = page.0;
        let meta = &mut self.meta[id.0 as usize];
        debug_assert!(meta.ref_count > 0, "page {} has no owner", id.0);
        meta.ref_count -= 1;
        if meta.ref_count > 0 {
            return;
        }
        if meta.retained {
            self.link_last(id.0);
        } else {
            self.free.push(id);
        }
    }

    /// Keeps a page in use when its last owner leaves.
    pub fn retain(&mut self, id: PageId, content: C) {
        debug_assert!(self.ref_count(id) > 0, "page {} has no owner", id.0);
        let meta = &mut self.meta[id.0 as usize];
        meta.retained = true;
        meta.content = content;
    }

    /// Ends a retention; an idle page becomes free.
    pub fn forget(&mut self, id: PageId) {
        let meta = &mut self.meta[id.0 as usize];
        if !meta.retained {
            return;
        }
        meta.retained = false;
        if meta.ref_count == 0 {
            self.unlink(id.0);
            self.free.push(id);
        }
    }

    /// The idle page that was used longest ago.
    pub fn least_recently_used(&self) -> Option<PageId> {
        let next = self.meta[self.sentinel() as usize].next;
        (next != self.sentinel()).then_some(PageId(next))
    }

    /// The idle pages, least recently used first.
    pub fn idle_pages(&self) -> impl Iterator<Item = PageId> + '_ {
        let mut at = self.sentinel();
        std::iter::from_fn(move || {
            at = self.meta[at as usize].next;
            (at != self.sentinel()).then_some(PageId(at))
        })
    }

    /// The pages on the free list.
    pub fn free_pages(&self) -> &[PageId] {
        &self.free
    }

    fn sentinel(&self) -> u32 {
        (self.meta.len() - 1) as u32
    }

    fn link_last(&mut self, at: u32) {
        let sentinel = self.sentinel();
        let last = self.meta[sentinel as usize].prev;
        self.meta[last as usize].next = at;
        self.meta[at as usize].prev = last;
        self.meta[at as usize].next = sentinel;
        self.meta[sentinel as usize].prev = at;
        self.num_idle += 1;
    }

    fn unlink(&mut self, at: u32) {
        let Meta { prev, next, .. } = self.meta[at as usize];
        self.meta[prev as usize].next = next;
        self.meta[next as usize].prev = prev;
        self.num_idle -= 1;
    }
}
