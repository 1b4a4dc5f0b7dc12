"""Drafts in steps that also hold prompt tokens: an option, off by default."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import BuildEngine
from msgspec.structs import replace
from sonar_engine.engine import Engine
from sonar_engine.types import SamplingParams
from test_engine import make_prompts

NUM_PROMPTS = 10
# Of many lengths, so that they do not all end together.
GREEDY = [SamplingParams(temperature=0.0, max_tokens=12 + 5 * i, ignore_eos=True) for i in range(NUM_PROMPTS)]
SEEDED = [replace(params, temperature=1.0, seed=7) for params in GREEDY]
FEW_SEQUENCES = {"max_num_seqs": 4}  # so that prompts are prefilled while others decode


def speculative(method: str, tiny_folder: Path, **fields: Any) -> dict[str, Any]:
    model = {"model": str(tiny_folder)} if method == "draft_model" else {}
    return {"method": method, "num_speculative_tokens": 3, **model, **fields}


def count_drafts_in_mixed_batches(engine: Engine) -> list[int]:
    """A list to which every step with prompt tokens adds its drafts."""
    counts: list[int] = []
    drafter = engine._drafter
    propose = drafter.propose

    def counting(batch: Any) -> Any:
        if 0 < batch.num_decode_reqs < batch.num_reqs:
            counts.append(batch.num_drafts)
        return propose(batch)

    drafter.propose = counting  # type: ignore[method-assign]
    return counts


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_drafting_in_mixed_batches_changes_no_token(build_tiny: BuildEngine, tiny_folder: Path, method: str) -> None:
    prompts = make_prompts(NUM_PROMPTS)
    off = build_tiny(**FEW_SEQUENCES)
    on = build_tiny(speculative=speculative(method, tiny_folder, speculate_in_mixed_batches=True), **FEW_SEQUENCES)
    counts = count_drafts_in_mixed_batches(on)
    for params in (GREEDY, SEEDED):
        expected = [completion.token_ids for completion in off.generate(prompts, params)]
        assert [completion.token_ids for completion in on.generate(prompts, params)] == expected
    assert sum(counts) > 0


def test_mixed_batches_hold_no_drafts_unless_asked(build_tiny: BuildEngine, tiny_folder: Path) -> None:
    engine = build_tiny(speculative=speculative("draft_model", tiny_folder), **FEW_SEQUENCES)
    counts = count_drafts_in_mixed_batches(engine)
    engine.generate(make_prompts(NUM_PROMPTS), GREEDY)
    assert len(counts) > 0
    assert sum(counts) == 0
    assert engine.stats().num_draft_tokens > 0
