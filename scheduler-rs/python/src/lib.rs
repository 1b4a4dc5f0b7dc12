//! Python bindings: the module `sonar_engine._scheduler`.
use pyo3::prelude::*;

/// The scheduler and the CPU kernels as one extension module.
#[pymodule]
fn _scheduler(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add("__version__", env!("CARGO_PKG_VERSION"))?;
    Ok(())
}
