"""Log-probabilities of emitted tokens: from raw logits, in the right place, the same with and without drafts."""

from __future__ import annotations

import pytest
import torch
from sampling_batches import sampled_batch, sampling_state
from sonar_engine.drafters.base import Draft
from sonar_engine.sampling.logprobs import LogprobTensors
from sonar_engine.types import SamplingParams
from sonar_engine.verification.verifier import Verifier
from toy_target import ToyLoop, corrupted, toy_logits

INT32 = torch.int32
GREEDY = SamplingParams(temperature=0.0, logprobs=2)


def one_step(params: list[SamplingParams], logits: torch.Tensor) -> tuple[list[int], LogprobTensors | None]:
    state = sampling_state(params, logits.shape[1])
    batch = sampled_batch(range(len(params)), [0] * len(params), [0] * len(params))
    verdict, logprobs = Verifier(state).verify(logits.clone(), batch, None)
    return verdict.tokens[:, 0].tolist(), logprobs


def test_nobody_asking_costs_nothing() -> None:
    assert one_step([SamplingParams(), SamplingParams()], torch.zeros(2, 5))[1] is None


def test_logprobs_are_the_log_softmax_with_the_best_entries_first() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, -1.0]])
    tokens, logprobs = one_step([GREEDY], logits)
    assert logprobs is not None
    wanted = logits.log_softmax(dim=1)[0]
    assert tokens == [1]
    assert logprobs.logprobs.tolist() == pytest.approx([wanted[1].item()])
    assert logprobs.ranks.tolist() == [1]
    assert logprobs.top_ids.tolist() == [[1, 2]]
    assert logprobs.top_logprobs[0].tolist() == pytest.approx([wanted[1].item(), wanted[2].item()])


def test_logprobs_come_from_the_raw_logits_whatever_was_done_to_them() -> None:
    """A temperature, a ban, a bias and a cut choose the token; its logprob and rank are those of the model."""
    logits = torch.tensor([[0.0, 5.0, 1.0, 4.0]])
    params = SamplingParams(
        temperature=0.2, banned_token_ids=[1, 3], logit_bias={0: 50.0}, top_k=1, logprobs=3, presence_penalty=1.0
    )
    tokens, logprobs = one_step([params], logits)
    assert logprobs is not None
    assert tokens == [0]
    assert logprobs.logprobs.tolist() == pytest.approx([logits.log_softmax(dim=1)[0, 0].item()])
    assert logprobs.ranks.tolist() == [4]
    assert logprobs.top_ids.tolist() == [[1, 3, 2]]


def test_tied_tokens_share_the_better_rank() -> None:
    tokens, logprobs = one_step([GREEDY], torch.tensor([[3.0, 3.0, 1.0]]))
    assert logprobs is not None
    assert (tokens, logprobs.ranks.tolist()) == ([0], [1])


def test_the_widest_request_sets_the_width_and_others_may_ask_for_none_or_no_top_entries() -> None:
    params = [SamplingParams(temperature=0.0, logprobs=count) for count in (0, 3, None)]
    _, logprobs = one_step(params, toy_logits(6)[:3])
    assert logprobs is not None
    assert logprobs.top_ids.shape == (3, 3)
    assert logprobs.ranks.tolist()[:2] == [1, 1]


def test_no_top_entries_and_more_than_the_vocabulary_are_served() -> None:
    _, none = one_step([SamplingParams(logprobs=0)], torch.zeros(1, 4))
    _, many = one_step([SamplingParams(logprobs=20)], torch.zeros(1, 4))
    assert none is not None
    assert many is not None
    assert none.top_ids.shape == (1, 1)
    assert many.top_ids.shape == (1, 4)


def test_each_position_of_an_accepted_block_has_its_own_logprobs() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, 0.0, 0.5], [0.0, 0.0, 4.0]])
    state = sampling_state([SamplingParams(temperature=0.0, logprobs=1)], 3)
    draft = Draft(torch.tensor([[1, 0]], dtype=INT32))
    verdict, logprobs = Verifier(state).verify(logits.clone(), sampled_batch([0], [2], [0]), draft)
    assert logprobs is not None
    assert verdict.tokens.tolist() == [[1, 0, 2]]
    wanted = logits.log_softmax(dim=1)[torch.arange(3), torch.tensor([1, 0, 2])]
    assert torch.allclose(logprobs.logprobs, wanted)
    assert logprobs.top_ids[:, 0].tolist() == [1, 0, 2]


def test_logprobs_of_accepted_tokens_equal_those_without_drafts() -> None:
    table = toy_logits(11)
    params = [
        SamplingParams(temperature=0.0, logprobs=2),
        SamplingParams(temperature=1.0, seed=4, logprobs=4, top_p=0.9),
        SamplingParams(temperature=1.2, seed=5),
        SamplingParams(temperature=0.0, logprobs=1, frequency_penalty=0.6),
    ]
    plain = ToyLoop(table, params)
    texts = plain.run(20)
    drafted = ToyLoop(table, params)
    drafted.run(20, corrupted(texts, 3, 11))
    assert drafted.num_accepted > 20
    assert drafted.outputs == texts
    for request in (0, 1, 3):
        width = params[request].logprobs
        for (chosen, rank, top), (wanted, wanted_rank, wanted_top) in zip(
            drafted.logprobs[request][:20], plain.logprobs[request], strict=True
        ):
            assert chosen == pytest.approx(wanted, abs=1e-6)
            assert (rank, top[:width]) == (wanted_rank, wanted_top[:width])
