"""Metrics of speculation against what verification really decided, of requests, of the engine and on `/metrics`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import BuildEngine
from sonar_engine.engine import Engine
from sonar_engine.response_metrics import response_metrics
from sonar_engine.server.metrics import ServerMetrics
from sonar_engine.types import SamplingParams
from test_engine import make_prompts

K = 4


class Ledger:
    """Every verdict on a row with drafts, by request id: (drafts, accepted)."""

    def __init__(self, engine: Engine) -> None:
        self.by_request: dict[int, list[tuple[int, int]]] = {}
        self._owners: dict[int, int] = {}
        verifier, drafter = engine._machine.verifier, engine._drafter
        verify, admit = verifier.verify, drafter.admit

        def watched_verify(logits: Any, batch: Any, draft: Any) -> Any:
            result = verify(logits, batch, draft)
            emitted = result[0].num_emitted.tolist()
            for row, drafted in enumerate(batch.host["num_draft_tokens"].tolist()):
                if drafted:
                    request = self._owners[int(batch.host["slots"][row])]
                    self.by_request.setdefault(request, []).append((drafted, emitted[row] - 1))
            return result

        def watched_admit(slot: int, request_id: int, speculate: int) -> None:
            self._owners[slot] = request_id
            admit(slot, request_id, speculate)

        verifier.verify = watched_verify  # type: ignore[method-assign]
        drafter.admit = watched_admit  # type: ignore[method-assign]


@pytest.mark.parametrize("options", [{}, {"kv_cache_tokens": 300, "max_num_batched_tokens": 31}], ids=["calm", "tight"])
@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_metrics_of_speculation_are_what_verification_decided(
    build_tiny: BuildEngine, tiny_folder: Path, method: str, options: dict[str, Any]
) -> None:
    model = {"model": str(tiny_folder), "dtype": "bfloat16"} if method == "draft_model" else {"prompt_lookup_min": 1}
    engine = build_tiny(speculative={"method": method, "num_speculative_tokens": K, **model}, **options)
    ledger = Ledger(engine)
    each = [
        SamplingParams(temperature=1.5 * (index % 2), seed=index, max_tokens=30, ignore_eos=True) for index in range(10)
    ]
    completions = engine.generate(make_prompts(10, longest=40), each)
    every = [entry for entries in ledger.by_request.values() for entry in entries]
    accepted = np.array([count for _, count in every])
    stats = engine.stats()
    assert stats.num_drafts == len(every) > 20
    assert stats.num_draft_tokens == sum(drafted for drafted, _ in every)
    assert stats.num_accepted_tokens == accepted.sum() > 0
    assert stats.accepted_per_pos == [int((accepted > position).sum()) for position in range(K)]
    assert stats.generation_tokens == sum(len(completion.token_ids) for completion in completions)
    for request_id, completion in enumerate(completions, start=1):
        entries = ledger.by_request.get(request_id, [])
        counts = [count for _, count in entries]
        assert response_metrics(completion.metrics, len(completion.token_ids))["speculative_decoding"] == {
            "num_spec_steps": len(entries),
            "num_draft_tokens": sum(drafted for drafted, _ in entries),
            "num_accepted_draft_tokens": sum(counts),
            "acceptance_histogram": [counts.count(i) for i in range(max(counts, default=-1) + 1)],
            "mean_acceptance_length": 1 + sum(counts) / len(counts) if counts else None,
            "draft_acceptance_rate": sum(counts) / sum(drafted for drafted, _ in entries) if entries else None,
        }
    shown = exposed(engine)
    assert shown["sonar_spec_decode_num_drafts_total"] == stats.num_drafts
    assert shown["sonar_spec_decode_num_draft_tokens_total"] == stats.num_draft_tokens
    assert shown["sonar_spec_decode_num_accepted_tokens_total"] == stats.num_accepted_tokens
    for position, count in enumerate(stats.accepted_per_pos):
        name = f'sonar_spec_decode_num_accepted_tokens_per_pos_total{{position="{position}"}}'
        assert shown[name] == count
    assert shown["sonar_num_preemptions_total"] == stats.num_preemptions
    assert (stats.num_preemptions > 0) == bool(options)
    stages = {stage: shown[f'sonar_step_seconds_total{{stage="{stage}"}}'] for stage in stats.step_seconds}
    assert set(stages) == {"plan", "draft", "verify", "ingest", "commit"}
    assert all(spent > 0 for stage, spent in stages.items() if stage != "ingest" or method == "draft_model")


def exposed(engine: Engine) -> dict[str, float]:
    text = ServerMetrics().render(engine.info, engine.stats()).decode()
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}
