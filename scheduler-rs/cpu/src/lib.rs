//! CPU kernels of the engine: matrix product over packed weights, paged attention, norms, rotary embedding,
//! gated activation and sampling.
//!
//! Every result is a fixed sequence of fp32 operations per output element. It depends, bit for bit, neither on how
//! many rows a call has, nor on the thread count, nor on the width of the vector unit.
//!
//! Memory is passed as raw pointers with sizes: callers own the tensors. All `unsafe` of the engine lives here; the
//! contracts are stated on each function and checked by `debug_assert!` where a check is cheap.
#![allow(unsafe_op_in_unsafe_fn)]

pub mod activation;
pub mod attention;
pub mod buffer;
pub mod dtype;
pub mod gemm;
mod math;
pub mod matrix;
pub mod norm;
pub mod panels;
pub mod quant;
pub mod quant_gemm;
pub mod rope;
pub mod sample;
pub mod simd;
pub mod threads;
mod tile;
