"""Rows carried from step to step, by slot."""

from __future__ import annotations

import torch


def copy_rows(source: torch.Tensor, source_rows: torch.Tensor, target: torch.Tensor, target_rows: torch.Tensor) -> None:
    """target[target_rows[i]] = source[source_rows[i]], in place, for i in 0..N.

    source [S, W] and target [T, W] of one dtype, rows with adjacent columns; source_rows, target_rows int [N] of one
    dtype, each target row at most once.
    """
    if target.is_cuda:
        from sonar_kernels.triton_kernels.head_input import copy_rows_triton

        copy_rows_triton(source, source_rows, target, target_rows)
    else:
        target[target_rows] = source[source_rows]
