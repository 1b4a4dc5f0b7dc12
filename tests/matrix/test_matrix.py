"""Every drafter in every situation gives exactly what the engine gives without speculation, on real SmolLM2-135M.

`make test-matrix` runs all of it, `make test` a slice: fewer layers, prompts and tokens, fp32 alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from conftest import MATRIX_ROWS
from head_watch import Texts
from matrix_setup import DRAFTERS, FULL, SLICE, Matrix, Requests
from sonar_engine.engine import Engine
from sonar_engine.types import Completion, SamplingParams
from test_oracle import accepted_in_each_step

# scenario -> supply of pages; all but the first run 16 at once
SCENARIOS = {"alone": "roomy", "staggered": "roomy", "warm": "roomy", "preempted": "tight"}
pytestmark = pytest.mark.timeout(3600)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    size = FULL if metafunc.config.getoption("--matrix") == "full" else SLICE
    if "scenario" in metafunc.fixturenames:
        cells = [(dtype, drafter, scenario) for dtype in size.dtypes for drafter in DRAFTERS for scenario in SCENARIOS]
        metafunc.parametrize(("dtype", "drafter", "scenario"), cells, ids=[", ".join(cell) for cell in cells])
    elif "dtype" in metafunc.fixturenames:
        metafunc.parametrize("dtype", size.dtypes)


@pytest.fixture(scope="module")
def matrix(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    size = FULL if request.config.getoption("--matrix") == "full" else SLICE
    matrix = Matrix(size, tmp_path_factory.mktemp("matrix"))
    yield matrix
    matrix.close()


@pytest.fixture
def rows(request: pytest.FixtureRequest) -> list[tuple[str, ...]]:
    """The table that is printed at the end."""
    return request.config.stash.setdefault(MATRIX_ROWS, [])


def assert_same(plain: Completion, drafted: Completion) -> None:
    assert drafted.token_ids == plain.token_ids
    assert drafted.text == plain.text
    assert (drafted.finish_reason, drafted.stop_reason) == (plain.finish_reason, plain.stop_reason)
    assert plain.logprobs is not None
    assert drafted.logprobs is not None
    for one, two in zip(plain.logprobs, drafted.logprobs, strict=True):
        assert two.logprob == pytest.approx(one.logprob, abs=1e-4)
        assert two.top_logprobs == pytest.approx(one.top_logprobs, abs=1e-4)


def run(engine: Engine, requests: Requests, scenario: str) -> int:
    """Runs the requests, asserts that they are answered as without speculation, and returns the tokens compared."""
    if scenario == "staggered":
        return run_staggered(engine, requests)
    prompts, params, plain = requests.prompts, requests.params, requests.plain
    if scenario == "alone":
        chosen = range(0, len(prompts), 5)
        completions = [engine.generate([prompts[index]], params[index])[0] for index in chosen]
        plain = [plain[index] for index in chosen]
    else:
        completions = engine.generate(prompts, params)
    for one, two in zip(plain, completions, strict=True):
        assert_same(one, two)
    return sum(len(completion.token_ids) for completion in completions)


def run_staggered(engine: Engine, requests: Requests) -> int:
    """A request every third step. Stop strings are found by the front end, so that here a text may go on behind one."""
    texts = Texts(engine)
    texts.run(requests.prompts, requests.params, gap=3)
    num_tokens = 0
    for prompt, params, plain, text in zip(
        requests.prompts, requests.params, requests.plain, texts.texts.values(), strict=True
    ):
        output = text[len(prompt) :]
        assert (output[: len(plain.token_ids)] if params.stop else output) == plain.token_ids
        num_tokens += len(plain.token_ids)
    return num_tokens


def test_every_drafter_gives_what_the_engine_gives_without_speculation(
    matrix: Matrix, rows: list[tuple[str, ...]], dtype: str, drafter: str, scenario: str
) -> None:
    every = matrix.requests(dtype)
    engine = matrix.engine(dtype, drafter, SCENARIOS[scenario])
    if scenario != "warm":
        engine.reset_prefix_cache()
    for name, requests in every.items():
        before = engine.stats()
        num_tokens = run(engine, requests, scenario)
        after = engine.stats()
        drafts = after.num_drafts - before.num_drafts
        drafted = after.num_draft_tokens - before.num_draft_tokens
        accepted = after.num_accepted_tokens - before.num_accepted_tokens
        if scenario == "warm":
            assert after.prefix_hits > before.prefix_hits
        assert drafted > 0
        if (drafter, name) == ("draft: itself", "greedy"):
            assert accepted == drafted
        length = 1 + accepted / max(drafts, 1)
        rows.append((dtype, drafter, scenario, name, str(num_tokens), str(drafted), f"{length:.2f}"))
    assert (engine.stats().num_preemptions > 0) == (scenario == "preempted")


def test_a_perfect_draft_is_accepted_where_drafts_are_sampled(
    matrix: Matrix, rows: list[tuple[str, ...]], dtype: str
) -> None:
    """Unseeded at temperature 1: the draft's law is the target's, so that block verification has nothing to reject."""
    prompts = matrix.requests(dtype)["greedy"].prompts
    params = SamplingParams(max_tokens=matrix.size.num_tokens, ignore_eos=True)
    for supply in ("roomy", "tight"):
        engine = matrix.engine(dtype, "draft: itself", supply)
        before = engine.stats()
        completions = engine.generate(prompts, params)
        after = engine.stats()
        drafted = after.num_draft_tokens - before.num_draft_tokens
        accepted = after.num_accepted_tokens - before.num_accepted_tokens
        assert (after.num_preemptions > before.num_preemptions) == (supply == "tight")
        assert drafted > 0
        assert accepted >= 0.999 * drafted
        num_tokens = sum(len(completion.token_ids) for completion in completions)
        length = 1 + accepted / (after.num_drafts - before.num_drafts)
        rows.append((dtype, "draft: itself", supply, "unseeded", str(num_tokens), str(drafted), f"{length:.2f}"))


@pytest.mark.parametrize("rate", [0.0, 0.5, 1.0])
def test_an_oracle_is_accepted_as_its_rate_and_coins_say(matrix: Matrix, dtype: str, rate: float) -> None:
    requests, num_tokens = matrix.requests(dtype)["greedy"], matrix.size.num_tokens
    engine = matrix.build_with(dtype, matrix.oracle(dtype, [rate]))
    slots: list[int] = []
    admit = engine._drafter.admit
    engine._drafter.admit = lambda slot, *others: (slots.append(slot), admit(slot, *others))[1]  # type: ignore
    for prompt, plain in zip(requests.prompts[:4], requests.plain[:4], strict=True):
        (alone,) = engine.generate([prompt], requests.params[0])
        assert alone.token_ids == plain.token_ids
        expected = accepted_in_each_step(engine, slots[-1], [rate], num_tokens)
        places = [1 + sum(expected[:step]) + step for step in range(len(expected))]
        with_drafts = [count for count, place in zip(expected, places, strict=True) if place < num_tokens - 1]
        speculation = alone.metrics.speculation
        assert speculation.num_accepted_draft_tokens == sum(expected)
        assert speculation.num_spec_steps == len(with_drafts)
        if rate in (0.0, 1.0):
            assert speculation.num_accepted_draft_tokens == rate * speculation.num_draft_tokens
    stats = engine.stats()
    engine.check_integrity()
    assert (stats.kv_cache_usage, sum(stats.accepted_per_pos)) == (0, stats.num_accepted_tokens)
    engine.close()
