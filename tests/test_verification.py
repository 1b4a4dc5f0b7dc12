"""Verification of draft chains as the engine runs it: empirical laws, and texts that drafts must not change."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import torch
from sampling_batches import sampled_batch, sampling_state
from sonar_engine.config import LossyConfig, SpeculativeConfig
from sonar_engine.config_loader import load_config
from sonar_engine.drafters.base import Draft
from sonar_engine.errors import ConfigError
from sonar_engine.sampling.coins import DRAFT, Seeds, accept_coins, draft_seeds
from sonar_engine.types import SamplingParams
from sonar_engine.verification.verifier import Verifier
from sonar_kernels import gumbel_argmax
from toy_target import ToyLoop, corrupted, no_drafts, toy_logits

rule_module = importlib.import_module("sonar_kernels.sampled_rule")
rules_module = importlib.import_module("sonar_engine.verification.rules")
INT32 = torch.int32


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors gain nothing from threads, and lose much where other processes are busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# The law of the engine's own path, empirically


def chi_square_z(counts: np.ndarray, probs: np.ndarray) -> float:
    """Wilson and Hilferty's normal score of Pearson's statistic; cells expected below 5 times are pooled."""
    expected = probs * counts.sum()
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    statistic, freedom = ((observed - expected) ** 2 / expected).sum(), len(expected) - 1
    return float(((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom)))


Noise = Callable[[Seeds, torch.Tensor, int], tuple[Seeds, torch.Tensor]]


def fresh_noise(seeds: Seeds, first_positions: torch.Tensor, step: int) -> tuple[Seeds, torch.Tensor]:
    """Seeds and positions of the noise that draws draft `step`."""
    return draft_seeds(seeds, step), first_positions


def noise_of_own_positions(seeds: Seeds, first_positions: torch.Tensor, step: int) -> tuple[Seeds, torch.Tensor]:
    """Comes back in the next step where a draft before this one was rejected."""
    return seeds.for_purpose(DRAFT), first_positions + step


def draw_drafts(
    drafter: torch.Tensor, last: torch.Tensor, noises: Sequence[tuple[Seeds, torch.Tensor]]
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, laws = [], []
    for own, positions in noises:
        laws.append(drafter[last])
        last = gumbel_argmax(laws[-1].log(), torch.ones(len(last)), own.lo, own.hi, positions).long()
        tokens.append(last)
    return torch.stack(tokens, dim=1), torch.stack(laws, dim=1)


def first_three_tokens(
    params: SamplingParams,
    with_probs: bool,
    *,
    runs: int = 200_000,
    config: SpeculativeConfig | None = None,
    token_map: torch.Tensor | None = None,
    noise: Noise = fresh_noise,
) -> tuple[np.ndarray, np.ndarray]:
    """Counts of the first three tokens over a vocabulary of 8, two drafts a step, and the target's law of them."""
    vocab_size, num_drafts, chunk = 8, 2, 20_000
    table, drafter = toy_logits(vocab_size, 1, spread=1.0), toy_logits(vocab_size, 2, spread=1.0).softmax(dim=1)
    if token_map is not None:
        unreachable = torch.ones(vocab_size, dtype=torch.bool).index_fill(0, token_map, False)
        drafter = drafter.masked_fill(unreachable, 0) / drafter[:, token_map].sum(dim=1, keepdim=True)
    random = torch.Generator().manual_seed(11)
    counts = np.zeros(vocab_size**3, np.int64)
    state = sampling_state([params], vocab_size, max_num_seqs=chunk)
    for setting in (state.inv_temperature, state.top_p, state.log_min_p, state.top_k, state.uses, state.host_top_k):
        setting[:] = setting[0]
    for _ in range(runs // chunk):
        for words in (state.seed_lo, state.seed_hi):
            words[:] = torch.randint(-(1 << 31), 1 << 31, (chunk,), generator=random)
        outputs = torch.zeros((chunk, 6), dtype=torch.int64)  # column 0: the prompt's last token
        lengths = torch.zeros(chunk, dtype=torch.int64)
        while (lengths < 3).any():
            running = torch.nonzero(lengths < 3)[:, 0]
            last = outputs[running, lengths[running]]
            seeds, positions = Seeds(state.seed_lo[running], state.seed_hi[running]), lengths[running].to(INT32)
            noises = [noise(seeds, positions, step) for step in range(num_drafts)]
            drafts, probs = draw_drafts(drafter, last, noises)
            rows = torch.cat([last[:, None], drafts], dim=1).flatten()
            batch = sampled_batch(running.tolist(), [num_drafts] * len(running), lengths[running].tolist())
            probs = probs if token_map is None else probs[:, :, token_map]
            draft = Draft(drafts.to(INT32), probs if with_probs else None, token_map)
            verdict, _ = Verifier(state, config=config).verify(table[rows].clone(), batch, draft)
            for step in range(num_drafts + 1):
                emitted = verdict.num_emitted > step
                places = (lengths[running] + 1 + step).clamp(max=5)
                outputs[running[emitted], places[emitted]] = verdict.tokens[emitted, step].long()
            lengths[running] += verdict.num_emitted
        index = (outputs[:, 1] * vocab_size + outputs[:, 2]) * vocab_size + outputs[:, 3]
        counts += np.bincount(index.numpy(), minlength=vocab_size**3)
    return counts, three_token_law(table, params)


def three_token_law(table: torch.Tensor, params: SamplingParams) -> np.ndarray:
    scaled = table.double() / params.temperature
    if params.top_k:
        scaled = scaled.masked_fill(scaled < scaled.topk(params.top_k, dim=1).values[:, -1:], -torch.inf)
    law = scaled.softmax(dim=1)
    return (law[0][:, None, None] * law[:, :, None] * law[None]).flatten().numpy()


UNSEEDED = SamplingParams(temperature=0.8, top_k=6)


TOKEN = SpeculativeConfig(verification="token")
LOSSY = SpeculativeConfig(lossy=LossyConfig())


@pytest.mark.parametrize(
    ("with_probs", "config", "token_map"),
    [(True, None, None), (True, TOKEN, None), (True, None, torch.tensor([6, 0, 3, 1])), (False, None, None)],
    ids=["block verification", "token verification", "a reduced vocabulary", "drafts without probabilities"],
)
def test_unseeded_text_follows_the_targets_law(
    with_probs: bool, config: SpeculativeConfig | None, token_map: torch.Tensor | None
) -> None:
    counts, law = first_three_tokens(UNSEEDED, with_probs, config=config, token_map=token_map)
    assert counts[law == 0].sum() == 0
    assert abs(chi_square_z(counts, law)) < 3.5


def test_the_empirical_law_notices_a_wrong_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rule_module, "residual_weights", lambda target, draft, factor, vocabulary: target)
    counts, law = first_three_tokens(UNSEEDED, with_probs=True, runs=40_000)
    assert chi_square_z(counts, law) > 6


def test_the_empirical_law_notices_coins_that_come_back_in_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Coins of the drafts' own output positions: a step that rejected the first of two has looked at the second's."""

    def of_own_positions(seeds: Seeds, first_positions: torch.Tensor, num_drafts: int) -> torch.Tensor:
        firsts = [accept_coins(seeds, first_positions + step, 1) for step in range(num_drafts)]
        return torch.cat(firsts, dim=1)

    monkeypatch.setattr(rules_module, "accept_coins", of_own_positions)
    counts, law = first_three_tokens(SamplingParams(temperature=3.0), with_probs=True)
    assert chi_square_z(counts, law) > 6


def test_the_empirical_law_notices_drafts_drawn_with_noise_that_comes_back() -> None:
    """The rejection has looked at all drafts of its step, so the next one's may not be made of the same noise."""
    counts, law = first_three_tokens(SamplingParams(temperature=3.0), with_probs=True, noise=noise_of_own_positions)
    assert chi_square_z(counts, law) > 6


def test_typical_acceptance_does_not_follow_the_targets_law() -> None:
    """It is lossy, which its name says and the exact tests must be able to see."""
    counts, law = first_three_tokens(UNSEEDED, with_probs=True, runs=20_000, config=LOSSY)
    assert chi_square_z(counts, law) > 6


# Drafts must not change a text that is a function of the request

VARIED = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, frequency_penalty=0.7),
    SamplingParams(temperature=0.0, presence_penalty=1.5, min_tokens=12),
    SamplingParams(temperature=0.0, repetition_penalty=1.8, logit_bias={4: 3.0, 5: -100.0}),
    SamplingParams(temperature=1.0, seed=7),
    SamplingParams(temperature=1.3, seed=-8, top_k=6, top_p=0.9),
    SamplingParams(temperature=0.9, seed=7, min_p=0.1, frequency_penalty=0.4, min_tokens=9, stop_token_ids=[3]),
    SamplingParams(temperature=1.0, seed=2**62, allowed_token_ids=[1, 2, 5, 6, 8], repetition_penalty=1.2),
    SamplingParams(temperature=0.7, seed=0, banned_token_ids=[2, 9], logit_bias={7: 2.5}),
    SamplingParams(temperature=1.0),
]
TABLE = toy_logits(11)
LENGTH = 30


def alone(params: SamplingParams, seed: int) -> list[int]:
    return ToyLoop(TABLE, [params], seeds=[seed]).run(LENGTH)[0]


@pytest.mark.parametrize("num_drafts", [1, 3, 5])
def test_texts_with_drafts_in_a_crowd_equal_each_request_alone_without(num_drafts: int) -> None:
    """Greedy, seeded and unseeded requests, with every penalty, mask and cut; unseeded ones keep their own seed."""
    texts = [alone(params, seed) for seed, params in enumerate(VARIED)]
    loop = ToyLoop(TABLE, VARIED)
    assert loop.run(LENGTH, corrupted(texts, num_drafts, TABLE.shape[0])) == texts
    assert loop.num_accepted > 2 * LENGTH
    assert loop.num_steps < LENGTH


def test_seeded_texts_do_not_depend_on_the_order_of_rows_or_slots() -> None:
    texts = ToyLoop(TABLE, VARIED).run(LENGTH)
    order = [3, 8, 1, 0, 9, 4, 7, 2, 6, 5]
    shuffled = ToyLoop(TABLE, [VARIED[i] for i in order], slots=[12, 3, 9, 0, 5, 7, 1, 11, 2, 8], seeds=order)
    assert shuffled.run(LENGTH) == [texts[i] for i in order]


def test_a_preempted_request_goes_on_in_another_slot_with_the_same_text() -> None:
    texts = ToyLoop(TABLE, VARIED).run(LENGTH)
    loop = ToyLoop(TABLE, VARIED, slots=range(2, 12))
    loop.run(11, corrupted(texts, 3, TABLE.shape[0]))
    for request in range(len(VARIED)):
        loop.admit(request, slot=11 - request)
    assert loop.run(LENGTH, corrupted(texts, 3, TABLE.shape[0])) == texts


def test_requests_with_the_same_seed_give_the_same_text_and_others_do_not() -> None:
    first, second, other = (SamplingParams(temperature=1.0, seed=seed) for seed in (5, 5, 6))
    texts = ToyLoop(TABLE, [first, second, other]).run(LENGTH)
    assert texts[0] == texts[1] != texts[2]


def test_min_tokens_forbids_ends_on_exactly_the_rows_below_it() -> None:
    """Token 0 is EOS and always best; rows with and without drafts, each around its own limit."""
    table = torch.zeros(6, 6)
    table[:, 0], table[:, 4], table[:, 5] = 9.0, 5.0, 4.0
    params = [SamplingParams(temperature=0.0, min_tokens=count, stop_token_ids=[4]) for count in (0, 3, 5)]
    loop = ToyLoop(table, params)
    loop.step([0, 1, 2], [[0, 0], [5, 5, 5, 0], []])
    assert loop.outputs == [[0, 0, 0], [5, 5, 5, 0, 0], [5]]
    loop.step([2], [[5, 5, 5, 5, 5]])
    assert loop.outputs[2] == [5, 5, 5, 5, 5, 0]


def test_penalties_count_the_drafts_before_each_verified_position() -> None:
    """Token 1 leads token 2 by 1.0 and each loses 0.6 with every use; a verified chain must count just the same."""
    table = torch.tensor([[0.0, 2.0, 1.0, 0.0]]).expand(4, 4).contiguous()
    params = [SamplingParams(temperature=0.0, frequency_penalty=0.6)]
    text = ToyLoop(table, params).run(6)[0]
    assert text == [1, 1, 2, 1, 2, 1]  # scores of token 1: 2.0, 1.4, 0.8, then 0.8 against 0.4, 0.2 against 0.4
    loop = ToyLoop(table, params)
    loop.step([0], [text[:5]])
    assert loop.outputs[0] == text
    assert loop.num_steps == 1


def test_a_chunk_that_does_not_reach_the_prompts_end_emits_nothing() -> None:
    state = sampling_state([SamplingParams(temperature=0.0)] * 3, 4)
    batch = sampled_batch([0, 1, 2], [0, 0, 0], [5, 0, 0], sampling=[True, False, True], num_decode_reqs=1)
    verdict, _ = Verifier(state).verify(torch.tensor([[0.0, 1, 0, 0], [0, 0, 0, 1.0]]), batch, None)
    assert verdict.num_emitted.tolist() == [1, 0, 1]
    assert verdict.tokens.tolist() == [[1], [-1], [3]]


def test_a_batch_that_samples_nothing_is_served() -> None:
    state = sampling_state([SamplingParams()], 4)
    batch = sampled_batch([0], [0], [0], sampling=[False], num_decode_reqs=0)
    verdict, logprobs = Verifier(state).verify(torch.zeros(0, 4), batch, None)
    assert (verdict.num_emitted.tolist(), verdict.tokens.tolist(), logprobs) == ([0], [[-1]], None)


def test_a_drafter_may_offer_more_columns_than_were_granted() -> None:
    state = sampling_state([SamplingParams(temperature=0.0)] * 2, 4)
    batch = sampled_batch([0, 1], [1, 0], [0, 0])
    logits = torch.nn.functional.one_hot(torch.tensor([2, 3, 1]), 4).float()
    draft = Draft(torch.tensor([[2, 3, 3], [1, 1, 1]], dtype=INT32), torch.full((2, 3, 4), 0.25))
    verdict, _ = Verifier(state).verify(logits, batch, draft)
    assert verdict.num_emitted.tolist() == [2, 1]
    assert verdict.tokens.tolist() == [[2, 3], [1, -1]]


def test_no_drafts_after_a_step_with_drafts_uses_none_of_them() -> None:
    """After a preemption the next step may run without drafting: nothing of the old draft may count."""
    texts = ToyLoop(TABLE, VARIED).run(LENGTH)
    loop = ToyLoop(TABLE, VARIED)
    loop.run(7, corrupted(texts, 4, TABLE.shape[0]))
    for request in range(len(VARIED)):
        loop.admit(request)
    assert loop.run(LENGTH, no_drafts) == texts


# Lossy verification, and what is exact in spite of it


@pytest.mark.parametrize("num_drafts", [1, 4])
def test_temperature_0_stays_exact_under_the_lossy_rule(num_drafts: int) -> None:
    params = [each for each in VARIED if each.temperature == 0]
    texts = ToyLoop(TABLE, params).run(LENGTH)
    loop = ToyLoop(TABLE, params, config=LOSSY)
    assert loop.run(LENGTH, corrupted(texts, num_drafts, TABLE.shape[0])) == texts
    assert loop.num_accepted > 0


def test_the_lossy_rule_lets_likely_drafts_into_seeded_and_unseeded_texts() -> None:
    """Every draft of a flat target passes, also of seeded requests, which are exact without the option."""
    params = [SamplingParams(temperature=1.0, seed=3), SamplingParams(temperature=1.0)]
    flat, drafts = torch.zeros(8, 8), [[1, 2, 3], [4, 5, 6]]
    lossy, exact = ToyLoop(flat, params, config=LOSSY), ToyLoop(flat, params)
    lossy.step([0, 1], drafts)
    assert [output[:3] for output in lossy.outputs] == drafts
    exact.step([0, 1], drafts)
    assert exact.outputs[0] == ToyLoop(flat, params).run(len(exact.outputs[0]))[0]
    assert exact.num_accepted < 3


def test_a_lossy_threshold_above_every_probability_accepts_nothing() -> None:
    config = SpeculativeConfig(lossy=LossyConfig(posterior_threshold=0.999, posterior_alpha=1.0))
    loop = ToyLoop(torch.tensor([2.0, 1.0, 0.0, 0.0]).expand(4, 4).contiguous(), [SamplingParams()], config=config)
    loop.step([0], [[2, 2]])
    assert loop.num_accepted == 0


@pytest.mark.parametrize("field", ["posterior_threshold", "posterior_alpha"])
@pytest.mark.parametrize("value", [0.0, -0.1, 1.1])
def test_lossy_settings_outside_their_ranges_are_refused(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        LossyConfig(**{field: value})


def test_verification_is_block_and_lossless_unless_the_configuration_says_otherwise() -> None:
    assert (SpeculativeConfig().verification, SpeculativeConfig().lossy) == ("block", None)
    speculative = '{"method": "ngram", "verification": "token", "lossy": {"posterior_alpha": 0.5}}'
    config = load_config({"speculative_config": speculative}, {}, None).engine.speculative
    assert config.verification == "token"
    assert config.lossy == LossyConfig(posterior_threshold=0.09, posterior_alpha=0.5)


# What does not fit


def test_probabilities_that_do_not_fit_the_vocabulary_are_refused() -> None:
    state, batch = sampling_state([SamplingParams()], 4), sampled_batch([0], [1], [0])
    tokens = torch.tensor([[2]], dtype=INT32)
    with pytest.raises(ConfigError, match=r"over 3 ids, but the target's vocabulary has 4"):
        Verifier(state).verify(torch.zeros(2, 4), batch, Draft(tokens, torch.full((1, 1, 3), 1 / 3)))
    with pytest.raises(ConfigError, match=r"over 4 ids, but the draft's token map has 2"):
        Verifier(state).verify(
            torch.zeros(2, 4), batch, Draft(tokens, torch.full((1, 1, 4), 0.25), torch.tensor([2, 3]))
        )


@pytest.mark.parametrize("token_map", [[0, 4], [-1, 2], [2, 2]])
def test_a_token_map_with_ids_outside_or_twice_is_refused(token_map: list[int]) -> None:
    state, batch = sampling_state([SamplingParams()], 4), sampled_batch([0], [1], [0])
    draft = Draft(torch.tensor([[2]], dtype=INT32), torch.full((1, 1, 2), 0.5), torch.tensor(token_map))
    with pytest.raises(ConfigError, match="token map"):
        Verifier(state).verify(torch.zeros(2, 4), batch, draft)


def test_seeded_texts_do_not_depend_on_the_probabilities_of_drafts() -> None:
    params = [SamplingParams(temperature=1.0, seed=3)]
    plain = ToyLoop(TABLE, params).run(12)[0]
    state, last = sampling_state(params, TABLE.shape[0]), 3
    for position in range(0, 12, 3):
        batch = sampled_batch([0], [2], [position])
        drafts = torch.tensor([plain[position : position + 2]])
        logits = TABLE[[last, *drafts[0].tolist()]].clone()
        draft = Draft(drafts.to(INT32), torch.nn.functional.one_hot(drafts, TABLE.shape[0]).float())
        verdict, _ = Verifier(state).verify(logits, batch, draft)
        assert verdict.tokens.tolist() == [plain[position : position + 3]]
        last = plain[position + 2]
