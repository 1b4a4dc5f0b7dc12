//! Rust's errors as the classes of `sonar_engine.errors`, one to one.

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;
use sonar_runtime::RuntimeError;
use sonar_scheduler::{PlanError, RequestError};

const MODULE: &str = "sonar_engine.errors";

/// The class of an error, imported once.
macro_rules! new_error {
    ($py:expr, $class:literal, $arguments:expr) => {{
        static CLASS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
        match CLASS.import($py, MODULE, $class) {
            Ok(class) => PyErr::from_type(class.clone(), $arguments),
            Err(missing) => missing,
        }
    }};
}

/// A configuration or argument that cannot work.
pub(crate) fn config_error(py: Python<'_>, message: String) -> PyErr {
    new_error!(py, "ConfigError", message)
}

/// A field of a request that cannot be served.
pub(crate) fn invalid_request(
    py: Python<'_>,
    message: String,
    param: Option<&'static str>,
    code: &'static str,
) -> PyErr {
    new_error!(py, "InvalidRequestError", (message, param, code))
}

/// The exception for an error of the runtime.
pub(crate) fn to_py(py: Python<'_>, error: &RuntimeError) -> PyErr {
    let message = error.to_string();
    match error {
        RuntimeError::Request(RequestError::QueueFull { .. }) => {
            new_error!(py, "QueueFullError", message)
        }
        RuntimeError::Request(error) => invalid_request(py, message, error.param(), error.code()),
        RuntimeError::Verdict(_) => new_error!(py, "VerdictError", message),
        RuntimeError::StaleStep { .. }
        | RuntimeError::Plan(PlanError::StepInFlight { .. })
        | RuntimeError::PlanPending
        | RuntimeError::NoPlan => new_error!(py, "StaleStepError", message),
        RuntimeError::Dead { .. } | RuntimeError::Spawn(_) => {
            new_error!(py, "EngineDeadError", message)
        }
        RuntimeError::Config(_)
        | RuntimeError::Plan(_)
        | RuntimeError::Cost(_)
        | RuntimeError::Ngram(_)
        | RuntimeError::SlotIndex { .. }
        | RuntimeError::Map { .. } => config_error(py, message),
    }
}
