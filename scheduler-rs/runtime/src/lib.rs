//! The scheduler among threads: packed slots in shared memory, a planner thread, and an inbox, so that submitting and
//! aborting never wait for planning.
#![deny(missing_docs)]

mod error;
mod handle;
mod inbox;
mod planner;
mod slots;

pub use error::RuntimeError;
pub use handle::SchedulerHandle;
pub use slots::{NUM_SLOTS, SlotMap};
