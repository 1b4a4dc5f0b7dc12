//! Numpy arguments: int32, contiguous, of the asked dimension, else a TypeError or ConfigError that names the argument.

use crate::errors::config_error;
use numpy::{PyReadonlyArray1, PyReadonlyArray2, PyReadwriteArray1, PyReadwriteArray2};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

/// The exception for an argument that is no such array.
fn wrong_type(name: &str, shape: &str, got: &Bound<'_, PyAny>) -> PyErr {
    let words = |attribute: &str| {
        got.getattr(attribute)
            .and_then(|value| value.str())
            .map(|text| text.to_string())
    };
    let found = match (words("dtype"), words("shape")) {
        (Ok(dtype), Ok(shape)) => format!("{dtype} of shape {shape}"),
        _ => got
            .get_type()
            .name()
            .map_or_else(|_| "another type".into(), |name| name.to_string()),
    };
    PyTypeError::new_err(format!(
        "{name} must be an int32 numpy array of shape {shape}; got {found}"
    ))
}

/// The exception for an array with gaps between its items.
pub(crate) fn not_contiguous(py: Python<'_>, name: &str) -> PyErr {
    config_error(
        py,
        format!("{name} must be contiguous; pass numpy.ascontiguousarray({name})"),
    )
}

macro_rules! int32_array {
    ($function:ident, $array:ident, $what:literal) => {
        #[doc = $what]
        pub(crate) fn $function<'py>(
            name: &str,
            shape: &str,
            value: &Bound<'py, PyAny>,
        ) -> PyResult<$array<'py, i32>> {
            value
                .extract::<$array<'py, i32>>()
                .map_err(|_| wrong_type(name, shape, value))
        }
    };
}

int32_array!(read1, PyReadonlyArray1, "One dimension, to be read.");
int32_array!(read2, PyReadonlyArray2, "Two dimensions, to be read.");
int32_array!(write1, PyReadwriteArray1, "One dimension, to be written.");
int32_array!(write2, PyReadwriteArray2, "Two dimensions, to be written.");
