"""The model against transformers: every family, every split of a sequence into steps, every dtype."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from batches import BatchRow
from model_runs import BACKEND_PARAMS, ModelRun, load_runner, needs_native, random_tokens, run_alone, torch_threads
from sonar_engine.layers.rope import build_cos_sin
from sonar_engine.model_runner import ModelRunner
from sonar_engine.models.model_config import ModelConfig
from sonar_engine.models.registry import resolve_model
from tiny_models import TINY_KINDS, make_tiny, transformers_model, transformers_smollm2

TOLERANCE = 1e-4  # absolute, on logits of magnitude 20 and more
LENGTHS = (37, 5, 61, 1)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Small tensors: a second thread would cost more than it gives."""
    with torch_threads(1):
        yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tiny")
    return {kind: make_tiny(kind, root / kind) for kind in TINY_KINDS}


@pytest.fixture(scope="module")
def references(folders: dict[str, Path]) -> dict[str, list[torch.Tensor]]:
    """transformers' logits [T, V] of one sequence a length of LENGTHS."""
    return {kind: _reference_logits(folder) for kind, folder in folders.items()}


def _reference_logits(folder: Path, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    model = transformers_model(folder, dtype)
    return [model(torch.tensor([tokens])).logits[0].float() for tokens in _sequences(model.config.vocab_size)]


def _sequences(vocab_size: int) -> list[list[int]]:
    return [random_tokens(vocab_size, length, seed) for seed, length in enumerate(LENGTHS)]


def _worst(run: ModelRun, references: list[torch.Tensor]) -> float:
    return max(float((run.logits(slot) - expected).abs().max()) for slot, expected in enumerate(references))


@pytest.mark.parametrize("backend", BACKEND_PARAMS)
@pytest.mark.parametrize("kind", TINY_KINDS)
def test_prompts_of_different_lengths_in_one_batch_give_the_logits_of_transformers(
    kind: str, backend: str, folders: dict[str, Path], references: dict[str, list[torch.Tensor]]
) -> None:
    runner = load_runner(folders[kind], backend)
    run = ModelRun(runner)
    run.advance(dict(enumerate(_sequences(runner.vocab_size))))
    assert _worst(run, references[kind]) < TOLERANCE


@pytest.mark.parametrize("backend", BACKEND_PARAMS)
@pytest.mark.parametrize("kind", TINY_KINDS)
def test_odd_chunks_then_decode_and_verify_rows_give_the_logits_of_one_pass(
    kind: str, backend: str, folders: dict[str, Path], references: dict[str, list[torch.Tensor]]
) -> None:
    runner = load_runner(folders[kind], backend)
    sequences, run = _sequences(runner.vocab_size), ModelRun(runner, seed=3)
    for chunk in (3, 7, 1, 11, 5, 2):  # prompt chunks, some of them beside rows that decode
        run.advance(_next_tokens(run, sequences, (chunk, 1, 2 * chunk, 1)), decode=[1, 3])
    for lengths in ((1, 1, 1, 1), (4, 1, 2, 1), (3, 1, 4, 1)):  # decode rows, then rows with drafts
        run.advance(_next_tokens(run, sequences, lengths), decode=[0, 1, 2, 3])
    got = [run.logits(slot) for slot in range(4)]
    assert [len(logits) for logits in got] == [37, 5, 61, 1]
    assert _worst(run, references[kind]) < TOLERANCE


def _next_tokens(run: ModelRun, sequences: list[list[int]], lengths: tuple[int, ...]) -> dict[int, list[int]]:
    """The next tokens of every sequence that has any left."""
    following = {}
    for slot, (tokens, length) in enumerate(zip(sequences, lengths, strict=True)):
        start = run.computed.get(slot, 0)
        if start < len(tokens):
            following[slot] = tokens[start : start + length]
    return following


@pytest.mark.parametrize("backend", BACKEND_PARAMS)
def test_a_sequence_that_shares_prefix_pages_gives_the_logits_of_a_cold_one(
    backend: str, folders: dict[str, Path]
) -> None:
    runner = load_runner(folders["llama3"], backend)
    prefix = random_tokens(runner.vocab_size, 24, seed=5)
    tails = [random_tokens(runner.vocab_size, 9, seed) for seed in (6, 7)]
    run = ModelRun(runner)
    run.advance({0: prefix + tails[0]})
    run.batches.share(0, 1, num_pages=6)
    run.computed[1] = 24
    run.advance({1: tails[1], 0: [3]}, decode=[0])
    expected = run_alone(runner, prefix + tails[1])[24:]
    assert float((run.logits(1) - expected).abs().max()) < TOLERANCE


@pytest.mark.parametrize("backend", BACKEND_PARAMS)
def test_what_rejected_drafts_wrote_is_overwritten_and_never_read(backend: str, folders: dict[str, Path]) -> None:
    runner = load_runner(folders["mistral"], backend)
    tokens = random_tokens(runner.vocab_size, 30, seed=8)
    run = ModelRun(runner)
    run.advance({0: tokens[:20]})
    run.advance({0: [tokens[20], 5, 6, 7]}, decode=[0])
    run.roll_back(0, 3)
    for token in tokens[21:]:
        run.advance({0: [token]}, decode=[0])
    assert float((run.logits(0) - run_alone(runner, tokens)).abs().max()) < TOLERANCE


@pytest.mark.parametrize("backend", BACKEND_PARAMS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["smollm", "qwen2", "qwen3"])
def test_half_precision_is_as_near_to_fp32_as_transformers_is(
    kind: str, dtype: str, backend: str, folders: dict[str, Path], references: dict[str, list[torch.Tensor]]
) -> None:
    runner = load_runner(folders[kind], backend, dtype=dtype)
    run = ModelRun(runner)
    run.advance(dict(enumerate(_sequences(runner.vocab_size))))
    theirs = _reference_logits(folders[kind], getattr(torch, dtype))
    their_error = torch.cat(theirs).sub(torch.cat(references[kind])).square().mean().sqrt()
    ours = torch.cat([run.logits(slot) for slot in range(len(LENGTHS))])
    our_error = ours.sub(torch.cat(references[kind])).square().mean().sqrt()
    assert float(our_error) < 1.25 * float(their_error)


@pytest.mark.parametrize("kind", TINY_KINDS)
def test_rotary_tables_equal_those_of_transformers(kind: str, folders: dict[str, Path]) -> None:
    theirs = transformers_model(folders[kind]).model.rotary_emb
    config = ModelConfig.from_hf(folders[kind])
    table = build_cos_sin(config, config.max_position_embeddings)
    positions = torch.arange(config.max_position_embeddings)[None]
    cos, sin = theirs(torch.zeros(1), positions)
    half = config.head_dim // 2
    torch.testing.assert_close(table[:, 0], cos[0, :, :half], atol=1e-5, rtol=0)
    torch.testing.assert_close(table[:, 1], sin[0, :, :half], atol=1e-5, rtol=0)


def test_yarn_takes_its_attention_factor_from_mscale_or_as_given(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64}
    for index, extra in enumerate(
        ({"attention_factor": 0.7}, {"mscale": 0.8, "mscale_all_dim": 0.4}, {"truncate": False})
    ):
        folder = make_tiny("yarn", tmp_path / str(index), rope_parameters={**rope, **extra})
        theirs = transformers_model(folder).model.rotary_emb
        config = ModelConfig.from_hf(folder)
        cos, _ = theirs(torch.zeros(1), torch.arange(200)[None])
        ours = build_cos_sin(config, 200)[:, 0]
        torch.testing.assert_close(ours, cos[0, :, : config.head_dim // 2], atol=1e-5, rtol=0)


def test_captured_states_are_the_inputs_of_the_layers(folders: dict[str, Path]) -> None:
    runner = load_runner(folders["smollm"], "torch")
    tokens = random_tokens(runner.vocab_size, 12, seed=1)
    run = ModelRun(runner)
    batch = run.batches.build([BatchRow(0, 0, tokens)])
    hidden, captured = runner.model.forward_with_capture(batch.token_ids, batch, (0, 2))
    reference = transformers_model(folders["smollm"])(torch.tensor([tokens]), output_hidden_states=True)
    torch.testing.assert_close(captured[0], reference.hidden_states[0][0], atol=1e-5, rtol=0)
    torch.testing.assert_close(captured[1], reference.hidden_states[2][0], atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(hidden, reference.hidden_states[-1][0], atol=1e-4, rtol=1e-5)


@pytest.fixture(scope="module", params=["torch", pytest.param("native", marks=needs_native)])
def smollm2(request: pytest.FixtureRequest) -> ModelRunner:
    path = resolve_model("smollm2-135m").path
    return load_runner(path, request.param, page_size=16, max_model_len=512, kv_cache_tokens=1024)


def test_smollm2_gives_the_logits_of_transformers_on_real_text(smollm2: ModelRunner) -> None:
    reference = transformers_smollm2(torch.float32)
    # "The capital of France is Paris." and "def add(a, b):\n    return a + b", in the model's own tokens.
    prompts = [[504, 3575, 282, 4649, 314, 7042, 30], [1604, 803, 24, 81, 28, 330, 727, 1116, 2138, 253, 1232, 330]]
    run = ModelRun(smollm2)
    run.advance({0: prompts[0][:3], 1: prompts[1][:7]})
    run.advance({0: prompts[0][3:4], 1: prompts[1][7:11]}, decode=[0, 1])
    run.advance({0: prompts[0][4:], 1: prompts[1][11:]})
    for slot, prompt in enumerate(prompts):
        expected = reference(torch.tensor([prompt])).logits[0]
        assert float((run.logits(slot) - expected).abs().max()) < 2e-4
        assert torch.equal(run.logits(slot).argmax(-1), expected.argmax(-1))
