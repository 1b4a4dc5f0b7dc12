"""The loss: fused, it is the plain one; and walking a text gives the acceptance that a loop over it gives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sonar_engine.training.loss import OutputRows, draft_loss, feature_loss, has_token, step_weights
from sonar_engine.training.packing import PackedBatch, build_batch
from sonar_engine.training.shards import CapturedTexts
from sonar_engine.training.walk import Walked, right_in_a_row, walk, walk_batch

K = 3
TOKEN_MAP = torch.tensor([2, 5, 9, 40, 41, 77, 200, 319])


@pytest.fixture(scope="module")
def batch(tiny_states: Path) -> PackedBatch:
    texts = CapturedTexts((tiny_states / "states",))
    return build_batch(texts, [[0, 1], [2], [3, 4], []], 256)


def output_rows(batch: PackedBatch, reduced: bool, whole: bool = False) -> OutputRows:
    size = batch.hidden.shape[-1]
    matrix = torch.randn((320, size), generator=torch.Generator().manual_seed(4)) / size**0.5
    ids = TOKEN_MAP if reduced else torch.arange(320)
    return OutputRows(matrix[ids], ids if reduced else None, matrix if whole else None)


def random_states(batch: PackedBatch) -> torch.Tensor:
    shape = (K, *batch.slots.shape, batch.hidden.shape[-1])
    return torch.randn(shape, generator=torch.Generator().manual_seed(5)).requires_grad_()


def plain_loss(states: torch.Tensor, batch: PackedBatch, output: OutputRows, weights: torch.Tensor) -> torch.Tensor:
    """With every logit in memory, by autograd."""
    total = torch.zeros(())
    for step in range(K):
        for row, column in torch.nonzero(has_token(batch, K)[step]).tolist():
            hidden = batch.hidden[row, batch.slots[row, column] + step + 1]
            p = (output.rows @ hidden).log_softmax(0)
            q = (output.rows @ states[step, row, column]).log_softmax(0)
            total = total + weights[step, row, column] * (p.exp() * (p - q)).sum()
    return total


@pytest.mark.parametrize("reduced", [True, False])
def test_the_fused_loss_and_its_gradient_are_the_plain_ones(batch: PackedBatch, reduced: bool) -> None:
    output, states = output_rows(batch, reduced), random_states(batch)
    weights = step_weights(batch, K, 0.8, 5)
    expected = plain_loss(states, batch, output, weights)
    (wanted,) = torch.autograd.grad(expected, states)
    loss, outcome = draft_loss(states, batch, output, weights)
    (gradient,) = torch.autograd.grad(2 * loss, states)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient, 2 * wanted, rtol=1e-4, atol=1e-8)
    assert float(wanted.abs().max()) > 1e-5
    torch.testing.assert_close((outcome.loss * weights).sum(), expected, rtol=1e-5, atol=1e-6)


def test_overlap_counts_what_lies_outside_the_draft_vocabulary_when_the_whole_matrix_is_there(
    batch: PackedBatch,
) -> None:
    output, states = output_rows(batch, reduced=True, whole=True), random_states(batch)
    _, outcome = draft_loss(states, batch, output, step_weights(batch, K, 1.0, 5))
    _, within = draft_loss(states, batch, output_rows(batch, reduced=True), step_weights(batch, K, 1.0, 5))
    for step, row, column in torch.nonzero(outcome.valid).tolist():
        hidden = batch.hidden[row, batch.slots[row, column] + step + 1]
        p = (output.whole @ hidden).softmax(0)[TOKEN_MAP]  # type: ignore[operator]
        q = (output.rows @ states[step, row, column]).softmax(0)
        torch.testing.assert_close(outcome.overlap[step, row, column], torch.minimum(p, q).sum(), rtol=1e-4, atol=1e-6)
        assert outcome.targets[step, row, column] == TOKEN_MAP[p.argmax()]
        assert outcome.drafts[step, row, column] == TOKEN_MAP[q.argmax()]
    assert float((within.overlap - outcome.overlap)[outcome.valid].min()) > 0


def test_each_text_counts_alike_and_each_step_less_than_the_one_before(batch: PackedBatch) -> None:
    weights = step_weights(batch, K, 0.5, 5)
    assert float(weights.sum()) == pytest.approx(1, rel=0.2)  # a text's last slots lack tokens for the later steps
    first = weights[0]
    by_text = [float(first[batch.text_ids == index].sum()) for index in range(5)]
    assert by_text == pytest.approx([by_text[0]] * 5)
    assert bool((weights[1][has_token(batch, K)[1]] > 0).all())
    assert float(weights[1].max()) == pytest.approx(0.5 * float(first.max()))


def test_the_feature_loss_compares_with_the_states_that_features_stand_for(batch: PackedBatch) -> None:
    weights = step_weights(batch, K, 1.0, 5)
    length = batch.tokens.shape[1]
    features = torch.stack(
        [
            batch.hidden.gather(1, (batch.slots + step + 1).clamp(max=length - 1)[..., None].expand(-1, -1, 144))
            for step in range(K)
        ]
    )
    assert float(feature_loss(features, batch, weights)) == 0
    assert float(feature_loss(features + 2, batch, weights)) == pytest.approx(1.5 * float(weights.sum()))
    shifted = torch.roll(features, 1, dims=0)
    assert float(feature_loss(shifted, batch, weights)) > 0.01


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(st.booleans(), min_size=K, max_size=K), max_size=30))
def test_walking_begins_each_draft_behind_what_was_accepted(right: list[list[bool]]) -> None:
    runs = [([*row, False]).index(False) for row in right]
    tokens, drafts, at, histogram = 0, 0, 0, [0] * (K + 1)
    while at < len(right):
        run = 0
        while run < K and right[at][run]:
            run += 1
        histogram[run] += 1
        tokens, drafts, at = tokens + run + 1, drafts + 1, at + run + 1
    walked = walk(runs, K)
    assert walked.accepted.tolist() == histogram
    assert walked.acceptance_length == pytest.approx(tokens / drafts if drafts else 1)
    if drafts:
        assert walked.reached.tolist() == [sum(histogram[j:]) / drafts for j in range(1, K + 1)]
        assert np.prod(walked.conditional) == pytest.approx(walked.reached[-1])


def test_drafts_are_right_where_they_are_the_texts_own_tokens(batch: PackedBatch) -> None:
    length = batch.tokens.shape[1]
    ahead = torch.arange(2, K + 2)[:, None, None]
    truth = torch.stack([batch.tokens.gather(1, (batch.slots + step + 2).clamp(max=length - 1)) for step in range(K)])
    runs = right_in_a_row(batch, truth)
    in_use = batch.lasts >= 0
    assert torch.equal(runs[in_use], (batch.slots + ahead <= batch.lasts).sum(0)[in_use])
    assert int(runs[~in_use].sum()) == 0
    wrong = truth.clone()
    wrong[1] += 1
    assert int(right_in_a_row(batch, wrong).max()) == 1
    walked = walk_batch(batch, truth)
    slots = [int((batch.text_ids == index).sum()) for index in range(5)]
    assert walked.num_drafts == sum(-(-count // (K + 1)) for count in slots)
    total = Walked.none(K)
    total.add(walked)
    assert total.acceptance_length == walked.acceptance_length > K
