"""The sampler, the processors of logits and the state by slot."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_batches import sampled_batch, sampling_state
from sonar_engine.drafters.base import Verdict
from sonar_engine.sampling.coins import Seeds
from sonar_engine.sampling.cuts import TopLimits, cut_min_p, cut_top
from sonar_engine.sampling.processors import process
from sonar_engine.sampling.row_pool import RowPool
from sonar_engine.sampling.sampler import Sampler
from sonar_engine.types import SamplingParams
from sonar_kernels.gumbel import gumbel_argmax_torch

INT32 = torch.int32
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors gain nothing from threads, and lose much where other processes are busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def words(*values: int) -> torch.Tensor:
    return torch.tensor(values).to(INT32)


# The sampler


def rows_of(params: list[SamplingParams], vocab_size: int, position: int = 0, seeds: list[int] | None = None) -> tuple:
    state = sampling_state(params, vocab_size, seeds=seeds)
    batch = sampled_batch(range(len(params)), [0] * len(params), [position] * len(params))
    return state, state.rows(batch)


def test_draws_follow_the_softmax_of_the_tempered_logits() -> None:
    logits = torch.tensor([1.0, 0.0, 2.0, -1.0, 0.5, -torch.inf])
    count, temperature = 60_000, 0.7
    random = torch.Generator().manual_seed(0)
    seeds = [torch.randint(-(1 << 31), 1 << 31, (count,), generator=random).to(INT32) for _ in range(2)]
    state = sampling_state([SamplingParams(temperature=temperature)], 6)
    rows = state.rows(sampled_batch([0] * count, [0] * count, [0] * count))
    rows.seeds = Seeds(*seeds)
    tokens = Sampler(torch.device("cpu")).sample(logits.expand(count, 6), rows)
    counts = np.bincount(tokens.numpy(), minlength=6)
    expected = (logits / temperature).softmax(dim=0).numpy() * count
    assert counts[5] == 0
    assert ((counts[:5] - expected[:5]) ** 2 / expected[:5]).sum() < 18.5  # 0.1 % point at 4 degrees of freedom


@pytest.mark.parametrize("vocab_size", [1, 7, 1000, 49_152])
def test_the_native_sampler_equals_the_torch_twin(vocab_size: int) -> None:
    params = [SamplingParams(temperature=value) for value in (0.0, 0.3, 1.0, 2.5)] * 8
    logits = torch.randn(32, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 3
    logits[:, vocab_size // 3] = -torch.inf if vocab_size > 1 else 0.0
    _, rows = rows_of(params, vocab_size, position=17)
    native = Sampler(torch.device("cpu")).sample(logits, rows)
    twin = gumbel_argmax_torch(logits, rows.inv_temperature, rows.seeds.lo, rows.seeds.hi, rows.positions)
    assert native.tolist() == twin.tolist()


def test_greedy_takes_the_lowest_of_tied_ids() -> None:
    logits = torch.zeros(2, 300)
    logits[0, [7, 260]] = 4.0
    logits[1, [0, 299]] = 4.0
    _, rows = rows_of([GREEDY] * 2, 300)
    assert Sampler(torch.device("cpu")).sample(logits, rows).tolist() == [7, 0]


def test_a_strided_view_of_logits_is_sampled_as_its_copy() -> None:
    wide = torch.randn(4, 80, generator=torch.Generator().manual_seed(3))
    _, rows = rows_of([SamplingParams()] * 4, 40)
    sampler = Sampler(torch.device("cpu"))
    assert torch.equal(sampler.sample(wide[:, ::2], rows), sampler.sample(wide[:, ::2].contiguous(), rows))


# Processors


def processed(params: SamplingParams, logits: list[float], position: int = 0, **history: list[int]) -> list[float]:
    state = sampling_state([params], len(logits), **history)
    rows = state.rows(sampled_batch([0], [0], [position]))
    return process(torch.tensor([logits]), rows, state, None)[0].tolist()


INF = math.inf


def test_allowed_ids_are_all_that_is_left() -> None:
    params = SamplingParams(allowed_token_ids=[1, 3])
    assert processed(params, [1.0, 2.0, 3.0, 4.0]) == [-INF, 2.0, -INF, 4.0]


def test_banned_ids_go_even_when_allowed_and_biased() -> None:
    params = SamplingParams(allowed_token_ids=[1, 3], banned_token_ids=[3], logit_bias={3: 100.0})
    assert processed(params, [1.0, 2.0, 3.0, 4.0]) == [-INF, 2.0, -INF, -INF]


def test_min_tokens_holds_back_eos_and_stop_ids_until_it_is_reached() -> None:
    params = SamplingParams(min_tokens=2, stop_token_ids=[3])
    for position in (0, 1):
        assert processed(params, [1.0] * 4, position, eos_token_ids=[0]) == [-INF, 1.0, 1.0, -INF]
    assert processed(params, [1.0] * 4, 2, eos_token_ids=[0]) == [1.0] * 4


def test_logit_bias_is_added_also_to_token_0() -> None:
    params = SamplingParams(logit_bias={0: -1.5, 2: 2.0})
    assert processed(params, [1.0, 2.0, 3.0]) == [-0.5, 2.0, 5.0]


def test_presence_and_frequency_count_the_output_alone() -> None:
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    assert processed(params, [1.0, 1.0, 1.0], prompt=[0, 0], output=[1, 1, 2]) == [1.0, 0.0, 0.25]


def test_repetition_counts_prompt_and_output_and_pushes_both_signs_down() -> None:
    params = SamplingParams(repetition_penalty=2.0)
    assert processed(params, [1.0, -1.0, 3.0, -3.0], prompt=[0], output=[1]) == [0.5, -2.0, 3.0, -3.0]


def test_top_k_keeps_the_k_best() -> None:
    assert processed(SamplingParams(top_k=2), [1.0, 4.0, 3.0, 2.0]) == [-INF, 4.0, 3.0, -INF]


def test_top_p_keeps_the_least_set_that_reaches_p() -> None:
    probs = [0.5, 0.25, 0.125, 0.125]
    logits = [math.log(value) for value in probs]
    for top_p, kept in ((0.4, 1), (0.51, 2), (0.74, 2), (0.76, 4), (1.0, 4)):  # the last two are tied
        got = processed(SamplingParams(top_p=top_p), logits)
        assert [value != -INF for value in got] == [i < kept for i in range(4)], top_p


def test_top_p_acts_on_what_top_k_left_renormalised() -> None:
    logits = [math.log(value) for value in (0.4, 0.3, 0.2, 0.1)]
    # Of the best two the first holds 0.4 / 0.7 = 0.57.
    assert [v != -INF for v in processed(SamplingParams(top_k=2, top_p=0.55), logits)] == [True, False, False, False]
    assert [v != -INF for v in processed(SamplingParams(top_k=2, top_p=0.6), logits)] == [True, True, False, False]


def test_min_p_is_relative_to_the_best_and_after_the_temperature() -> None:
    logits = [0.0, -1.0, -2.0]
    assert processed(SamplingParams(min_p=0.2), logits) == [0.0, -1.0, -INF]
    assert processed(SamplingParams(min_p=0.2, temperature=2.0), logits) == [0.0, -1.0, -2.0]


def test_tied_tokens_share_their_fate() -> None:
    assert processed(SamplingParams(top_k=2), [3.0, 2.0, 2.0, 1.0]) == [3.0, 2.0, 2.0, -INF]
    assert processed(SamplingParams(top_p=0.5), [2.0, 2.0, 2.0, 2.0]) == [2.0] * 4


def plain_cut(logits: np.ndarray, top_k: int, top_p: float) -> np.ndarray:
    """What top-k and then top-p keep, written out over one sorted row."""
    order = np.argsort(-logits, kind="stable")
    k = min(top_k, len(logits))
    weights = np.exp(logits[order[:k]] - logits.max())
    before = np.cumsum(weights) - weights
    kept = max(int((before < top_p * weights.sum()).sum()), 1) if top_p < 1 else k
    return logits >= logits[order[kept - 1]]


@pytest.mark.parametrize("vocab_size", [5, 600, 3000])
def test_cuts_equal_a_plain_sort_whatever_width_is_looked_at(vocab_size: int) -> None:
    """Peaked and flat rows together: some need no more than the first few entries, others the whole row."""
    random = np.random.default_rng(vocab_size)
    spread = random.choice([0.01, 0.3, 2.0, 6.0], 40)[:, None]
    logits = (random.standard_normal((40, vocab_size)) * spread).astype(np.float32)
    top_k = np.where(random.random(40) < 0.5, vocab_size, random.integers(1, vocab_size + 1, 40))
    top_p = np.where(random.random(40) < 0.2, 1.0, random.uniform(0.05, 0.999, 40)).astype(np.float32)
    inv_temperature = np.where(random.random(40) < 0.5, 1.0, random.uniform(0.5, 2.0, 40)).astype(np.float32)
    limits = TopLimits(*(torch.from_numpy(each) for each in (inv_temperature, top_k, top_p)))
    rows = (logits * inv_temperature[:, None]).astype(np.float64)
    wanted = np.stack([plain_cut(row, k, p) for row, k, p in zip(rows, top_k, top_p, strict=True)])
    got = cut_top(torch.from_numpy(logits), limits, int(top_k.max()))
    wrong = torch.isfinite(got).numpy() != wanted
    assert wrong.sum(axis=1).max() <= 1  # fp32 sums may put the edge one token further
    assert wrong.any(axis=1).sum() <= 2


def test_a_small_top_k_gives_the_same_cut_alone_as_beside_wide_rows() -> None:
    logits = torch.randn(3, 4000, generator=torch.Generator().manual_seed(1))
    limits = TopLimits(torch.tensor([0.7, 1.0, 1.3]), torch.tensor([20, 4000, 900]), torch.tensor([0.8, 0.95, 0.5]))
    together = cut_top(logits.clone(), limits, 4000)
    for row in range(3):
        alone = cut_top(logits[row : row + 1].clone(), limits.rows(torch.tensor([row])), int(limits.top_k[row]))
        assert torch.equal(alone, together[row : row + 1])


def test_min_p_off_leaves_a_row_alone() -> None:
    logits = torch.tensor([[0.0, -50.0], [0.0, -50.0]])
    assert cut_min_p(logits, torch.ones(2), torch.tensor([-INF, math.log(0.5)])).tolist() == [[0.0, -50.0], [0.0, -INF]]


SETTINGS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.5, 1.0, 1.7]),
        "top_k": st.sampled_from([0, 1, 3, 11]),
        "top_p": st.sampled_from([1.0, 0.9, 0.3]),
        "min_p": st.sampled_from([0.0, 0.1]),
        "repetition_penalty": st.sampled_from([1.0, 1.3]),
        "presence_penalty": st.sampled_from([0.0, -0.7]),
        "frequency_penalty": st.sampled_from([0.0, 0.4]),
        "logit_bias": st.sampled_from([None, {1: 4.0, 0: -2.0}]),
        "allowed_token_ids": st.sampled_from([None, [1, 2, 3, 8]]),
        "banned_token_ids": st.sampled_from([None, [2, 9]]),
        "min_tokens": st.sampled_from([0, 4]),
        "stop_token_ids": st.sampled_from([[], [3]]),
    }
)


@given(st.lists(SETTINGS, min_size=1, max_size=5), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_a_mixed_batch_gives_each_row_what_it_gets_alone(several: list[dict], seed: int) -> None:
    """Every feature in any mixture, with different numbers of drafts a row."""
    params, vocab_size = [SamplingParams(**each) for each in several], 12
    random = torch.Generator().manual_seed(seed)
    history = {"prompt": [1, 2, 2], "output": [3, 1], "eos_token_ids": [0]}
    drafts = [i % 3 for i in range(len(params))]
    batch = sampled_batch(range(len(params)), drafts, [2] * len(params))
    logits = torch.randn(batch.num_sample_rows, vocab_size, generator=random) * 2
    tokens = torch.randint(0, vocab_size, (len(params), 2), generator=random).to(INT32)
    state = sampling_state(params, vocab_size, **history)
    together = process(logits.clone(), state.rows(batch), state, tokens)
    for row, each in enumerate(params):
        own = sampling_state([each], vocab_size, **history)
        first, end = batch.sample_indptr[row], batch.sample_indptr[row + 1]
        single = own.rows(sampled_batch([0], [drafts[row]], [2]))
        alone = process(logits[first:end].clone(), single, own, tokens[row : row + 1])
        assert torch.equal(alone, together[first:end])
        assert torch.isfinite(alone.amax(dim=1)).all()


def test_a_batch_that_asks_for_nothing_keeps_its_logits_untouched() -> None:
    state, rows = rows_of([GREEDY, SamplingParams()], 5)
    logits = torch.randn(2, 5)
    before, address = logits.clone(), logits.data_ptr()
    after = process(logits, rows, state, None)
    assert after.data_ptr() == address
    assert torch.equal(after, before)


def test_greedy_rows_skip_cuts_that_cannot_change_them() -> None:
    logits = [1.0, 4.0, 3.0]
    assert processed(SamplingParams(temperature=0.0, top_k=1, top_p=0.1, min_p=0.5), logits) == logits


# State by slot


def test_what_a_slot_held_before_is_forgotten() -> None:
    state = sampling_state(
        [SamplingParams(allowed_token_ids=[1], logit_bias={2: 5.0}, presence_penalty=1.0, min_tokens=3)],
        4,
        eos_token_ids=[0],
        output=[1],
    )
    state.admit(0, SamplingParams(presence_penalty=0.5), np.array([], np.int32), np.array([2], np.int32), params_seed=1)
    logits = process(torch.ones(1, 4), state.rows(sampled_batch([0], [0], [1])), state, None)
    assert logits.tolist() == [[1.0, 1.0, 0.5, 1.0]]


def test_observed_tokens_are_counted_for_the_requests_that_need_it() -> None:
    params = [SamplingParams(frequency_penalty=0.5), SamplingParams(), SamplingParams(frequency_penalty=1.0)]
    state = sampling_state(params, 4)
    batch = sampled_batch([0, 1, 2], [2, 2, 2], [0, 0, 0])
    tokens = torch.stack([words(1, 1, 2), words(3, -1, -1), words(0, 3, -1)])
    state.observe(batch, Verdict(words(3, 1, 2), tokens))
    logits = process(torch.zeros(3, 4), state.rows(sampled_batch([0, 1, 2], [0] * 3, [3, 1, 2])), state, None)
    assert logits.tolist() == [[0, -1.0, -0.5, 0], [0, 0, 0, 0], [-1.0, 0, 0, -1.0]]


def test_the_same_token_accepted_twice_in_one_block_counts_twice() -> None:
    state = sampling_state([SamplingParams(frequency_penalty=1.0)], 2)
    state.observe(sampled_batch([0], [3], [0]), Verdict(words(4), torch.stack([words(1, 1, 1, 0)])))
    rows = state.rows(sampled_batch([0], [0], [4]))
    assert process(torch.zeros(1, 2), rows, state, None).tolist() == [[-1.0, -3.0]]


def test_an_unseeded_request_keeps_the_seed_that_the_engine_drew() -> None:
    tokens = []
    for seed in (5, 5, 6):
        _, rows = rows_of([SamplingParams()], 1000, seeds=[seed])
        tokens.append(Sampler(torch.device("cpu")).sample(torch.zeros(1, 1000), rows).item())
    assert tokens[0] == tokens[1] != tokens[2]


def test_a_row_pool_lends_each_slot_its_own_clean_row_and_reuses_rows() -> None:
    pool = RowPool(8, 3, INT32, torch.device("cpu"))
    for slot in (0, 5, 2):
        pool.lend(slot).fill_(slot + 1)
    assert pool.rows[pool.index_of(np.array([2, 0, 5]))].tolist() == [[3] * 3, [1] * 3, [6] * 3]
    capacity = pool.rows.shape[0]
    pool.give_back(5)
    pool.give_back(5)
    assert pool.lend(7).tolist() == [0, 0, 0]
    assert pool.lend(6).tolist() == [0, 0, 0]
    assert pool.rows.shape[0] == capacity == 4
    assert pool.rows[pool.index_of(np.array([0]))].tolist() == [[1] * 3]
