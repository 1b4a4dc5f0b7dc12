"""`sonar verify` on tiny models: it passes what is lossless, and notices what is not."""

from __future__ import annotations

import importlib
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from sonar_engine.verification import verifier as verifier_module
from test_cli import SMALL, Sonar, assert_one_line_error, prompts_file
from tiny_heads import make_head
from tiny_models import make_tiny

rule_module = importlib.import_module("sonar_kernels.sampled_rule")
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
LINES = [json.dumps({"prompt": text}) for text in ("ab ab ab", "the cat sat", "on the mat on the", "dog dog")]


@pytest.fixture
def sonar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Sonar:
    return Sonar(monkeypatch, capsys)


def make_flat(folder: Path, noise: float = 0.0) -> Path:
    """A model of a flat law over 320 tokens; `noise` on its weights makes another one that is often right about it."""
    make_tiny("llama3", folder, tokenizer=True, num_hidden_layers=1)
    generator = torch.Generator().manual_seed(1)
    weights = load_file(folder / "model.safetensors")
    for name, tensor in weights.items():
        weights[name] = tensor + noise * tensor.std() * torch.randn(tensor.shape, generator=generator)
    weights["model.norm.weight"] *= 0.5
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def small_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_flat(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def draft_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_flat(tmp_path_factory.mktemp("draft"), noise=0.1)


@pytest.fixture
def verify(sonar: Sonar, small_folder: Path, tmp_path: Path) -> Callable[..., tuple[int, dict[str, Any]]]:
    """Runs the command and returns its exit code and its JSON object."""
    file = prompts_file(tmp_path, *LINES)

    def run(speculative: dict[str, Any], *arguments: str, samples: int = 1000) -> tuple[int, dict[str, Any]]:
        command = ["verify", "--model", str(small_folder), *SMALL, "--prompts", file, "--max-tokens", "40"]
        command += ["--speculative-config", json.dumps(speculative), "--samples", str(samples), "--json"]
        code = sonar(*command, *arguments)
        return code, sonar.json_lines()[0]

    return run


Verify = Callable[..., tuple[int, dict[str, Any]]]


def drafting(folder: Path, **fields: Any) -> dict[str, Any]:
    return {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 3, **fields}


# What is lossless passes.


@pytest.mark.parametrize("method", ["ngram", "draft_model", "draft_model by token verification", "mtp"])
def test_every_lossless_way_of_drafting_passes(
    verify: Verify, small_folder: Path, draft_folder: Path, tmp_path: Path, method: str
) -> None:
    config = {
        "ngram": NGRAM,
        "draft_model": drafting(draft_folder),
        "draft_model by token verification": drafting(draft_folder, verification="token"),
        "mtp": {"method": "mtp", "model": str(tmp_path / "head"), "num_speculative_tokens": 3},
    }[method]
    if method == "mtp":
        make_head(small_folder, tmp_path / "head")
    code, report = verify(config)
    assert (code, report["passed"]) == (0, True)
    for part in ("greedy", "seeded"):
        assert report[part]["differences"] == []
        assert report[part]["num_prompts"] == len(LINES)
        assert report[part]["num_tokens"] > 40
        assert report[part]["max_logprob_difference"] == 0.0  # batch-invariant mode
        assert report[part]["num_draft_tokens"] > 0
    assert report["law"]["num_samples"] == 1000
    assert report["law"]["p_value"] >= report["law"]["least_p_value"]
    assert report["law"]["tests"][0]["degrees_of_freedom"] > 20


def test_acceptance_is_reported_by_part_and_position(verify: Verify, small_folder: Path) -> None:
    code, report = verify(drafting(small_folder), samples=0)
    assert code == 0
    greedy = report["greedy"]
    assert greedy["num_accepted_tokens"] == greedy["num_draft_tokens"] > 0
    assert greedy["mean_acceptance_length"] == pytest.approx(1 + sum(greedy["acceptance_per_position"]))
    assert 3 < greedy["mean_acceptance_length"] <= 4
    assert report["law"]["num_samples"] == 0
    assert report["law"]["p_value"] is None


def test_people_read_one_line_a_finding(sonar: Sonar, small_folder: Path, tmp_path: Path) -> None:
    command = ["verify", "--model", str(small_folder), *SMALL, "--speculative-config", json.dumps(NGRAM)]
    command += ["--prompts", prompts_file(tmp_path, *LINES), "--num-prompts", "3"]
    assert sonar(*command, "--max-tokens", "8", "--samples", "300") == 0
    lines = sonar.out.splitlines()
    assert lines[0].endswith("float32, batch-invariant: ngram, K = 3")
    assert lines[1].startswith("temperature 0: equal; ")
    assert " of 3 prompts" in lines[1]
    assert lines[2].startswith("  acceptance length ") or lines[2] == "  nothing was drafted"
    assert lines[3].startswith("seeded, temperature 1: equal; ")
    assert lines[5].startswith("unseeded, temperature 1, 300 samples of 4 tokens: p = ")
    assert lines[5].endswith(" >= 0.0001")
    assert lines[6].startswith("  all tokens, every prefix: chi-square ")
    assert lines[-1] == "passed"


# What is not lossless fails.


def test_a_verifier_that_accepts_a_draft_too_many_fails_at_temperature_0(
    verify: Verify, draft_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept = verifier_module.accept

    def accept_one_more(
        draft_tokens: torch.Tensor, num_draft_tokens: torch.Tensor, *others: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num_emitted, tokens = accept(draft_tokens, num_draft_tokens, *others)
        for row in range(len(num_draft_tokens)):
            count = int(num_emitted[row])
            if count <= int(num_draft_tokens[row]):
                tokens[row, count - 1] = draft_tokens[row, count - 1]
        return num_emitted, tokens

    monkeypatch.setattr(verifier_module, "accept", accept_one_more)
    code, report = verify(drafting(draft_folder), samples=0)
    assert (code, report["passed"]) == (1, False)
    difference = report["greedy"]["differences"][0]
    assert difference["token_off"] != difference["token_on"]
    assert difference["logprob_on"] < difference["logprob_off"]
    assert not difference["near_tie"]


def test_a_residual_that_is_a_softmax_fails_in_the_unseeded_samples_alone(
    verify: Verify, draft_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def softmax(target: torch.Tensor, draft: torch.Tensor, factor: torch.Tensor, vocabulary: None) -> torch.Tensor:
        return (target * factor[:, None] - draft).softmax(dim=1)

    monkeypatch.setattr(rule_module, "residual_weights", softmax)
    code, report = verify(drafting(draft_folder))
    assert code == 1
    assert report["greedy"]["passed"] and report["seeded"]["passed"]
    assert not report["law"]["passed"]
    assert report["law"]["p_value"] < report["law"]["least_p_value"]


def test_the_lossy_option_fails_above_temperature_0_alone(verify: Verify, draft_folder: Path) -> None:
    lossy = {"posterior_threshold": 0.01, "posterior_alpha": 0.05}
    code, report = verify(drafting(draft_folder, lossy=lossy), samples=3000)
    assert code == 1
    assert report["lossy"]
    assert report["greedy"]["passed"]
    assert not report["seeded"]["passed"]
    assert not report["law"]["passed"]


def test_a_near_tie_is_an_excuse_only_outside_batch_invariant_mode(
    verify: Verify, small_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = importlib.import_module("sonar_engine.lossless.texts")
    report_module = importlib.import_module("sonar_engine.lossless.report")

    def with_a_near_tie(*arguments: Any) -> Any:
        tie = texts.Difference(0, 3, 5, -1.0, 6, -1.0, near_tie=True)
        return texts.TextsTest(1, 3, 0.0, [tie])

    monkeypatch.setattr(report_module, "compare_texts", with_a_near_tie)
    assert verify(NGRAM, samples=0)[0] == 1
    code, report = verify(NGRAM, "--no-batch-invariant", samples=0)
    assert (code, report["batch_invariant"]) == (0, False)


# What cannot be compared ends with code 2.


@pytest.fixture
def never_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*unused: Any) -> None:
        raise AssertionError("a prompt was run")

    monkeypatch.setattr("sonar_engine.engine.Engine.generate", run)


@pytest.mark.usefixtures("never_run")
@pytest.mark.parametrize(
    ("speculative", "options", "part"),
    [
        ({"method": "draft_model", "model": "./nowhere"}, {}, "nowhere"),
        ({"method": "mtp", "model": "./no_head"}, {}, "no_head"),
        (NGRAM, {"--kv-cache-tokens": "256"}, "kv_cache_tokens"),  # enough without drafts
        (NGRAM, {"--max-model-len": "10"}, "the samples: "),
    ],
)
def test_what_can_not_draft_is_told_before_anything_runs(
    sonar: Sonar, draft_folder: Path, speculative: dict[str, Any], options: dict[str, str], part: str
) -> None:
    prompts = prompts_file(draft_folder, json.dumps({"prompt": "ab ab"}))
    command = ["verify", "--model", str(draft_folder), *SMALL, "--prompts", prompts, "--max-tokens", "2"]
    given = itertools.chain.from_iterable(options.items())
    assert sonar(*command, "--speculative-config", json.dumps(speculative), *given) == 2
    assert_one_line_error(sonar, part)


def test_a_run_that_drafted_nothing_has_compared_nothing(verify: Verify) -> None:
    code, report = verify({**NGRAM, "prompt_lookup_min": 16, "prompt_lookup_max": 16}, "--max-tokens", "4", samples=0)
    assert code == 2
    assert not report["passed"] and not report["drafted"]


def test_a_crash_does_not_look_like_a_difference(
    sonar: Sonar, small_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*unused: Any) -> None:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr("sonar_engine.engine.Engine.generate", crash)
    assert sonar("verify", "--model", str(small_folder), *SMALL, "--spec-method", "ngram", "--max-tokens", "8") == 2
    assert "a fault of ours" in sonar.err


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ([], "speculation is off"),
        (["--spec-method", "draft_model"], "needs a model"),
        (["--spec-method", "ngram", "--prompts", "none.jsonl"], "none.jsonl"),
        (["--spec-method", "ngram", "--model", "./nowhere"], "nowhere"),
        (["--spec-method", "ngram", "--max-tokens", "1000"], "1000"),
    ],
)
def test_what_cannot_be_compared_is_one_line_and_exit_code_2(
    sonar: Sonar, small_folder: Path, arguments: list[str], part: str
) -> None:
    assert sonar("verify", "--model", str(small_folder), *SMALL, *arguments) == 2
    assert_one_line_error(sonar, part)


@pytest.mark.parametrize("arguments", [["--max-tokens", "1"], ["--num-prompts", "0"], ["--samples", "-1"], ["--no"]])
def test_wrong_options_end_with_code_2(sonar: Sonar, arguments: list[str]) -> None:
    assert sonar("verify", "--spec-method", "ngram", *arguments) == 2
