"""The default model against transformers, on the very same weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sonar_engine.config import EngineConfig, SpeculativeConfig
from sonar_engine.engine import Engine, build_engine
from sonar_engine.types import SamplingParams
from tiny_models import transformers_smollm2

PROMPTS = Path(__file__).parent.parent / "bench" / "prompts.jsonl"
NEAR_TIE = 1e-4


def chat_prompts(engine: Engine, count: int) -> list[list[int]]:
    """Token ids of the first prompts of our own collection, in the model's chat template."""
    rows = [json.loads(line) for line in PROMPTS.read_text().splitlines()[:count]]
    return [
        engine.tokenizer.apply_chat_template(row.get("messages") or [{"role": "user", "content": row["prompt"]}])
        for row in rows
    ]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 1024, "max_num_seqs": 20, "kv_cache_tokens": 16384}
    engine = build_engine(EngineConfig(model="smollm2-135m", **options))
    yield engine
    engine.close()


def test_every_greedy_token_is_the_argmax_of_transformers(engine: Engine) -> None:
    prompts = chat_prompts(engine, 20)
    params = SamplingParams(temperature=0.0, max_tokens=128, ignore_eos=True)
    reference = transformers_smollm2(torch.float32)
    near_ties = 0
    for completion in engine.generate(prompts, params):
        prompt, tokens = completion.prompt_token_ids, completion.token_ids
        assert len(tokens) == 128
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        top = logits.topk(2)
        wrong = top.indices[:, 0] != torch.tensor(tokens)
        gap = top.values[:, 0] - logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert not (wrong & (gap >= NEAR_TIE)).any()
        near_ties += int(wrong.sum())
    assert near_ties <= 3


def test_ngram_drafting_gives_the_same_tokens_and_drafts_are_accepted() -> None:
    base: dict[str, Any] = {"model": "smollm2-135m", "dtype": "float32", "max_model_len": 1024, "max_num_seqs": 8}
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True, logprobs=2)
    results = []
    for speculative in (SpeculativeConfig(), SpeculativeConfig(method="ngram")):
        engine = build_engine(EngineConfig(**base, batch_invariant=True, speculative=speculative))
        results.append(engine.generate(chat_prompts(engine, 8), params))
        accepted = engine.stats().num_accepted_tokens
        engine.close()
    assert accepted > 0
    for plain, drafted in zip(*results, strict=True):
        assert plain.token_ids == drafted.token_ids
        assert plain.text == drafted.text
        assert plain.logprobs is not None
        assert drafted.logprobs is not None
        for one, two in zip(plain.logprobs, drafted.logprobs, strict=True):
            assert one.logprob == pytest.approx(two.logprob, abs=1e-4)
