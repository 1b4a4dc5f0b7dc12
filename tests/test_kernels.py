"""The kernels: Triton against the torch twins without a GPU, ahead-of-time compilation, and the twins themselves."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from sonar_kernels import (
    DraftVocabulary,
    SampledRule,
    TypicalRule,
    accept,
    build_page_indices,
    copy_rows,
    fill_draft_tokens,
    gumbel_argmax,
    shift_tokens,
    update_page_table,
)

TESTS = Path(__file__).parent
INT32 = torch.int32

POINTERS = {
    "logits": "*fp32",
    "inv_temperature": "*fp32",
    "target_probs": "*fp32",
    "draft_probs": "*fp32",
    "accept_coins": "*fp32",
    "factors": "*fp32",
    "posterior_threshold": "fp32",
    "posterior_alpha": "fp32",
    "source": "*bf16",
    "target": "*bf16",
}
NUMBERS = {
    "row_stride", "vocab_size", "draft_stride", "draft_probs_stride", "draft_probs_step_stride", "num_decode",
    "width", "num_tokens", "num_pages", "emitted_stride", "source_stride", "target_stride",
}  # fmt: skip
COMPILED = [
    ("gumbel", "gumbel_argmax_kernel", {"BLOCK": 2048}),
    ("accept", "accept_kernel", {"HAS_RULE": False, "BLOCK_K": 8}),
    ("accept", "accept_kernel", {"HAS_RULE": True, "BLOCK_K": 4}),
    ("sampled_rule", "judge_kernel", {"HAS_MAP": False, "BLOCK": 2048}),
    ("sampled_rule", "judge_kernel", {"HAS_MAP": True, "BLOCK": 2048}),
    ("sampled_rule", "recover_kernel", {"HAS_MAP": False, "BLOCK": 2048}),
    ("sampled_rule", "recover_kernel", {"HAS_MAP": True, "BLOCK": 2048}),
    ("typical_rule", "judge_typical_kernel", {"BLOCK": 2048}),
    ("packed", "fill_draft_tokens_kernel", {"BLOCK": 256}),
    ("packed", "update_page_table_kernel", {"BLOCK": 256}),
    ("packed", "build_page_indices_kernel", {"BLOCK": 256}),
    ("head_input", "shift_tokens_kernel", {"BLOCK": 256}),
    ("head_input", "copy_rows_kernel", {"BLOCK": 1024}),
]


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=INT32)


def test_every_triton_kernel_equals_its_torch_twin_in_the_interpreter() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    program = TESTS / "triton_in_the_interpreter.py"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, program], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    checks = ["gumbel", "accept", "law", "packed", "noise", "shifted_tokens", "copied_rows"]
    assert done.stdout.split() == [f"check_{name}" for name in checks]


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize(("module", "name", "constants"), COMPILED, ids=str)
def test_every_triton_kernel_compiles_ahead_of_time(
    module: str, name: str, constants: dict[str, int], arch: int
) -> None:
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    backends = importlib.import_module("triton.backends")
    if "nvidia" not in backends.backends:
        pytest.skip("this Triton has no NVIDIA backend")
    source_of = importlib.import_module("triton.compiler").ASTSource
    target = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", arch, 32)
    kernel = getattr(importlib.import_module(f"sonar_kernels.triton_kernels.{module}"), name)
    signature = {
        argument: "constexpr"
        if argument in constants
        else "i32"
        if argument in NUMBERS
        else POINTERS.get(argument, "*i32")
        for argument in kernel.arg_names
    }
    binary = triton.compile(source_of(kernel, signature, constexprs=constants), target=target)
    assert f"sm_{arch}" in binary.asm["ptx"]


def test_importing_the_kernels_does_not_import_triton() -> None:
    code = "import sonar_kernels, sys; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_match_rule_accepts_while_drafts_equal_the_targets_choice() -> None:
    drafts = torch.stack([ints(5, 6, 7), ints(5, 9, 7), ints(1, 6, 7), ints(8, 8, 8)])
    num_drafts, indptr = ints(3, 3, 2, 0, 0), ints(0, 4, 8, 11, 12, 12)
    targets = ints(5, 6, 7, 8, 5, 6, 7, 8, 5, 6, 7, 3)
    num_emitted, tokens = accept(drafts, num_drafts, indptr, targets)
    assert num_emitted.tolist() == [4, 2, 1, 1, 0]
    assert tokens.tolist() == [[5, 6, 7, 8], [5, 6, -1, -1], [5, -1, -1, -1], [3, -1, -1, -1], [-1, -1, -1, -1]]


def test_columns_beyond_a_rows_drafts_are_never_accepted() -> None:
    num_emitted, tokens = accept(torch.stack([ints(5, 6), ints(5, 6)]), ints(1, 2), ints(0, 2, 5), ints(5, 6, 5, 6, 7))
    assert num_emitted.tolist() == [2, 3]
    assert tokens.tolist() == [[5, 6, -1], [5, 6, 7]]


def test_rows_of_every_lossless_kind_mix_in_one_batch() -> None:
    """Row 0 goes by sample and match, row 1 by token verification, rows 2 and 3 by block verification."""
    probs = torch.tensor([0.0, 0.25, 0.75, 0.0])
    rule = SampledRule(
        requests=ints(1, 2, 3),
        block=torch.tensor([False, True, True]),
        target_probs=probs.expand(3, 2, 4),
        draft_probs=torch.tensor([0.0, 0.5, 0.5, 0.0]).expand(4, 2, 4),
        accept_coins=torch.tensor([[0.4, 0.6], [0.9, 0.4], [0.3, 0.6]]),
        seed_lo=ints(3, 3, 3),
        seed_hi=ints(4, 4, 4),
        positions=ints(0, 0, 0),
    )
    drafts = torch.stack([ints(1, 1), ints(1, 1), ints(1, 2), ints(1, 1)])
    choices = ints(1, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3)
    num_emitted, tokens = accept(drafts, ints(2, 2, 2, 2), ints(0, 3, 6, 9, 12), choices, rule)
    # Row 2: P = 0.5, 0.75; the first coin fails and the second passes, so both drafts stand.
    # Row 3: P = 0.5, 0.25; h = 0 (no residual at P = 0.5), 0.25: neither passes.
    assert num_emitted.tolist() == [2, 2, 3, 1]
    # The residuals of rows 1 and 3 hold token 2 alone.
    assert tokens.tolist() == [[1, 3, -1], [1, 2, -1], [1, 2, 3], [2, -1, -1]]


def test_a_reduced_draft_vocabulary_is_mapped() -> None:
    """Draft ids 0, 1 are target ids 3, 1: the draft 1 has probability 0.8, and token 2 is never drafted."""
    rule = SampledRule(
        requests=ints(0, 1),
        block=torch.tensor([False, True]),
        target_probs=torch.tensor([0.0, 0.4, 0.6, 0.0]).expand(2, 1, 4),
        draft_probs=torch.tensor([0.2, 0.8]).expand(2, 1, 2),
        accept_coins=torch.tensor([[0.51], [0.49]]),
        seed_lo=ints(3, 3),
        seed_hi=ints(4, 4),
        positions=ints(0, 0),
        vocabulary=DraftVocabulary(target_ids=ints(3, 1), draft_ids=ints(-1, 1, -1, 0)),
    )
    num_emitted, tokens = accept(torch.stack([ints(1), ints(1)]), ints(1, 1), ints(0, 2, 4), ints(3, 3, 3, 3), rule)
    assert num_emitted.tolist() == [1, 2]
    assert tokens.tolist() == [[2, -1], [1, 3]]


def test_typical_acceptance_is_lossy_and_follows_the_entropy() -> None:
    """An improbable draft passes where the target is unsure (0.25 > 0.3 * exp(-log 4)) and not where it is sure."""
    target = torch.tensor([[[0.25, 0.25, 0.25, 0.25], [0.06, 0.94, 0.0, 0.0]]])
    rule = TypicalRule(requests=ints(1), target_probs=target, posterior_threshold=0.09, posterior_alpha=0.3)
    drafts = torch.stack([ints(0, 0), ints(0, 0)])
    num_emitted, tokens = accept(drafts, ints(2, 2), ints(0, 3, 6), ints(1, 1, 1, 1, 1, 1), rule)
    assert num_emitted.tolist() == [1, 2]
    assert tokens.tolist() == [[1, -1, -1], [0, 1, -1]]


def test_draft_tokens_go_where_the_batch_left_holes() -> None:
    token_ids = ints(10, -1, -1, 20, 30, 31, 32)
    fill_draft_tokens(token_ids, ints(0, 0, 0, 1, 2, 2, 2), ints(0, 3, 4, 7), torch.stack([ints(1, 2), ints(3, 4)]))
    assert token_ids.tolist() == [10, 1, 2, 20, 30, 31, 32]


def test_a_batch_without_draft_columns_is_left_as_it_is() -> None:
    token_ids = ints(10, 20)
    fill_draft_tokens(token_ids, ints(0, 1), ints(0, 1, 2), torch.zeros((2, 0), dtype=INT32))
    assert token_ids.tolist() == [10, 20]


def test_page_indices_list_each_rows_pages_in_order() -> None:
    table = torch.zeros((4, 3), dtype=INT32)
    update_page_table(table, ints(3, 3, 1), ints(0, 1, 0), ints(7, 9, 8))
    assert table.tolist() == [[0, 0, 0], [8, 0, 0], [0, 0, 0], [7, 9, 0]]
    assert build_page_indices(table, ints(3, 0, 1), ints(0, 2, 2, 3), 3).tolist() == [7, 9, 8]


def test_shifted_tokens_are_followed_by_what_was_emitted_or_the_next_prompt_token() -> None:
    """Two drafts, one of them accepted; a chunk in mid-prompt; a chunk that ends a prompt; a row without drafts."""
    token_ids = ints(10, 11, 12, 20, 30, 31, 32, 40, 41)
    token_reqs, qo_indptr = ints(0, 0, 0, 1, 2, 2, 2, 3, 3), ints(0, 3, 4, 7, 9)
    emitted = torch.stack([ints(11, 19, -1), ints(21, -1, -1), ints(-1, -1, -1), ints(42, -1, -1)])
    shifted = shift_tokens(token_ids, token_reqs, qo_indptr, ints(0, 3, 4, 4, 5), ints(-1, -1, 33, -1), emitted)
    assert shifted.tolist() == [11, 19, 0, 21, 31, 32, 33, 41, 42]


def test_rows_are_copied_to_the_rows_named() -> None:
    target = torch.zeros(4, 2)
    copy_rows(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), ints(1, 0), target, ints(3, 1))
    assert target.tolist() == [[0.0, 0.0], [1.0, 2.0], [0.0, 0.0], [3.0, 4.0]]


def test_greedy_rows_take_the_lowest_of_tied_ids_beside_sampled_rows() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0], [5.0, 5.0, 0.0], [-torch.inf, 0.0, -torch.inf]])
    tokens = gumbel_argmax(logits, torch.tensor([0.0, 0.0, 1.0]), ints(1, 2, 3), ints(1, 2, 3), ints(0, 0, 0))
    assert tokens.tolist() == [1, 0, 1]


@pytest.mark.gpu
def test_every_triton_kernel_equals_its_torch_twin_on_the_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    random = torch.Generator().manual_seed(3)
    logits = torch.randn(64, 50_000, generator=random)
    seeds = [torch.randint(-(1 << 31), 1 << 31, (64,), generator=random).to(INT32) for _ in range(3)]
    arguments = (logits, torch.tensor([0.0, 1.0] * 32), *seeds)
    expected = gumbel_argmax(*arguments)
    got = gumbel_argmax(*(tensor.cuda() for tensor in arguments)).cpu()
    assert (got == expected).float().mean() > 0.98  # logarithms differ in the last bits, so near-ties may fall apart
    assert torch.equal(got[::2], expected[::2])
