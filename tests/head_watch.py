"""What an MTP head holds after every step of an engine, against the head over the whole sequence at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sonar_engine.drafters.base import Verdict
from sonar_engine.drafters.mtp import MtpDrafter
from sonar_engine.drafters.mtp_checkpoint import load_head, read_head_config
from sonar_engine.drafters.mtp_head import MtpHead
from sonar_engine.engine import Engine
from sonar_engine.models.model_config import ModelConfig
from sonar_engine.step_buffers import BatchMetadata
from sonar_engine.types import SamplingParams
from tiny_heads import WholeSequence
from tiny_models import transformers_model


def drafting(head: Path, k: int = 3, **fields: Any) -> dict[str, Any]:
    return {"method": "mtp", "model": str(head), "num_speculative_tokens": k, **fields}


def drafter_of(engine: Engine) -> MtpDrafter:
    drafter = engine._drafter
    assert isinstance(drafter, MtpDrafter)
    return drafter


@dataclass
class Snapshot:
    """Of one row after a step: keys and values of `length` positions a layer [L, 2, length, Hkv, D]."""

    request_id: int
    length: int
    keys_and_values: torch.Tensor
    carried: tuple[torch.Tensor, torch.Tensor] | None  # feature [H] and logits [W] of position length - 1


class Texts:
    """Runs requests through an engine that come one after the other; keeps each one's prompt and output."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.texts: dict[int, list[int]] = {}

    def run(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams], gap: int = 0) -> None:
        """Submits a prompt every `gap` steps and runs to the end."""
        first = 1 + max(self.texts, default=0)
        for request_id, (prompt, each) in enumerate(zip(prompts, params, strict=True), start=first):
            self.texts[request_id] = list(prompt)
            self.engine.submit(request_id, prompt, each)
            for _ in range(gap):
                self.step()
        while self.engine.has_work():
            self.step()

    def step(self) -> None:
        events = self.engine.step()
        if events is None:
            return
        tokens = np.frombuffer(events.tokens, np.int32).tolist()
        counts = np.frombuffer(events.num_tokens, np.int32).tolist()
        for request_id, count in zip(np.frombuffer(events.request_ids, np.int64).tolist(), counts, strict=True):
            self.texts[request_id] += tokens[:count]
            del tokens[:count]


class Watch(Texts):
    """Takes a snapshot of every row after every step."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.drafter = drafter_of(engine)
        self.snapshots: list[Snapshot] = []
        self._owners: dict[int, tuple[int, bool]] = {}  # slot -> request id, whether it speculates
        self._admit, self._ingest = self.drafter.admit, self.drafter.ingest
        self.drafter.admit = self.admit  # type: ignore[method-assign]
        self.drafter.ingest = self.ingest  # type: ignore[method-assign]

    def admit(self, slot: int, request_id: int, speculate: int) -> None:
        self._admit(slot, request_id, speculate)
        self._owners[slot] = request_id, speculate > 0

    def ingest(self, batch: BatchMetadata, hidden: torch.Tensor, verdict: Verdict) -> None:
        self._ingest(batch, hidden, verdict)
        host, num_emitted = batch.host, verdict.num_emitted.tolist()
        for row, slot in enumerate(host["slots"].tolist()):
            known = int(host["kv_len"][row] - host["num_draft_tokens"][row])
            computed = known + max(num_emitted[row] - 1, 0)
            self._take(slot, computed, num_emitted[row] > 0)

    def _take(self, slot: int, computed: int, samples: bool) -> None:
        drafter = self.drafter
        request_id, speculates = self._owners[slot]
        layers, table = drafter._kv_cache.layers, drafter._kv_cache.page_table
        page_size = drafter._kv_cache.plan.page_size
        positions = torch.arange(computed)
        pages, offsets = table[slot][positions // page_size].long(), positions % page_size
        entries = torch.stack([layer[pages, :, offsets].transpose(0, 1) for layer in layers])
        carried = None
        if samples and speculates:
            logits = drafter._output(drafter._carried.for_logits[slot : slot + 1])[0]
            carried = drafter._carried.features[slot].clone(), logits
        self.snapshots.append(Snapshot(request_id, computed, entries.clone(), carried))

    def check(self, head: MtpHead, token_map: torch.Tensor | None, target: Path) -> None:
        """Every snapshot equals the head over the final text with the target's hidden states, up to rounding.

        An entry depends on no later token than the next one, so one pass over the text serves all its snapshots. The
        last entries of a request that stopped inside a block depend on tokens it did not keep.
        """
        reference = transformers_model(target)
        by_request: dict[int, list[Snapshot]] = {}
        for snapshot in self.snapshots:
            by_request.setdefault(snapshot.request_id, []).append(snapshot)
        for request_id, snapshots in by_request.items():
            text = torch.tensor(self.texts[request_id])
            with torch.no_grad():
                hidden = reference.model(text[None]).last_hidden_state[0]
                embeddings = reference.get_input_embeddings()(text)
                whole = WholeSequence([], [])
                states = head(embeddings[1:], hidden[:-1], torch.arange(len(text) - 1, dtype=torch.int32), whole)
                logits = reference.lm_head(states.for_logits)
            logits = logits if token_map is None else logits[:, token_map]
            keys_and_values = torch.stack([torch.stack(pair) for pair in zip(whole.keys, whole.values, strict=True)])
            for snapshot in snapshots:
                length = min(snapshot.length, len(text) - 1)
                close(snapshot.keys_and_values[:, :, :length], keys_and_values[:, :, :length])
                if snapshot.carried is not None and length == snapshot.length:
                    close(snapshot.carried[0], states.features[length - 1])
                    close(snapshot.carried[1], logits[length - 1])


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=2e-3, atol=2e-3)


def loaded(head: Path, target: Path) -> tuple[MtpHead, torch.Tensor | None]:
    files = read_head_config(head)
    result = load_head(files, target, ModelConfig.load(target), max_positions=300, dtype=torch.float32)
    return result.head, result.token_map
