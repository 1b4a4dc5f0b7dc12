//! Python bindings: the module `sonar_engine._scheduler`. They convert; the work is done in the other crates.

mod arrays;
mod cpu;
mod cpu_attention;
mod errors;
mod events;
mod scheduler;

use pyo3::prelude::*;

/// The scheduler and the CPU kernels as one extension module.
#[pymodule]
fn _scheduler(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add("__version__", env!("CARGO_PKG_VERSION"))?;
    m.add_class::<scheduler::Scheduler>()?;
    m.add_class::<events::Events>()?;
    m.add_class::<events::Stats>()?;
    cpu::register(m)?;
    Ok(())
}
