"""Kernels of Sonar Engine: each a Triton kernel and a torch twin behind one function that picks by device."""

from sonar_kernels.accept import accept
from sonar_kernels.draft_tokens import fill_draft_tokens
from sonar_kernels.gumbel import gumbel_argmax
from sonar_kernels.pages import build_page_indices, update_page_table
from sonar_kernels.rows import copy_rows
from sonar_kernels.sampled_rule import DraftVocabulary, SampledRule
from sonar_kernels.shift_tokens import shift_tokens
from sonar_kernels.typical_rule import TypicalRule

__all__ = [
    "DraftVocabulary",
    "SampledRule",
    "TypicalRule",
    "accept",
    "build_page_indices",
    "copy_rows",
    "fill_draft_tokens",
    "gumbel_argmax",
    "shift_tokens",
    "update_page_table",
]
