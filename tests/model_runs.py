"""Runs a loaded model over hand-made batches: every logit of every token, whatever the split into steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from batches import BatchRow, PagedBatches
from sonar_engine.config import EngineConfig
from sonar_engine.layers.select import native_extension_error
from sonar_engine.model_runner import ModelRunner
from sonar_engine.models.registry import ResolvedModel

needs_native = pytest.mark.skipif(native_extension_error() is not None, reason=str(native_extension_error()))

# How the model is computed: the options of EngineConfig by a short name.
BACKENDS = {
    "torch": {"linear_backend": "torch", "attention_backend": "torch"},
    "torch_invariant": {"linear_backend": "torch", "attention_backend": "torch", "batch_invariant": True},
    "native": {"linear_backend": "native", "attention_backend": "native", "batch_invariant": True},
}
BACKEND_PARAMS = [pytest.param(name, marks=[needs_native] if name == "native" else []) for name in BACKENDS]
INVARIANT_PARAMS = [p for p in BACKEND_PARAMS if p.values[0] != "torch"]


@contextmanager
def torch_threads(num_threads: int) -> Iterator[None]:
    """torch on that many threads, and as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    yield
    torch.set_num_threads(before)


def load_runner(path: Path, backend: str, dtype: str = "float32", **options: object) -> ModelRunner:
    config = {"page_size": 4, "kv_cache_tokens": 2048, "max_num_seqs": 40, "device": "cpu"}
    kind = "gguf" if path.suffix == ".gguf" else "hf"
    engine_config = EngineConfig(model=str(path), dtype=dtype, **{**config, **BACKENDS[backend], **options})
    return ModelRunner.load(engine_config, ResolvedModel(path, kind, path.name))


class ModelRun:
    """Sequences in slots over one runner. `advance` runs one step and keeps each sequence's logits."""

    def __init__(self, runner: ModelRunner, seed: int = 0) -> None:
        self.runner = runner
        plan = runner.kv_cache.plan
        self.batches = PagedBatches(
            num_pages=plan.num_pages,
            page_size=plan.page_size,
            max_num_seqs=runner.page_table.shape[0],
            max_pages=plan.max_pages_per_seq,
            seed=seed,
        )
        self.computed: dict[int, int] = {}
        self._logits: dict[int, list[torch.Tensor]] = {}

    def advance(self, tokens: dict[int, Sequence[int]], decode: Sequence[int] = ()) -> None:
        """The next tokens of each slot, in one batch; slots in `decode` are its decode rows."""
        rows = [BatchRow(slot, self.computed.get(slot, 0), ids, slot in decode) for slot, ids in tokens.items()]
        batch = self.batches.build(rows)
        hidden = self.runner.forward(batch)
        logits = self.runner.logits(
            hidden, torch.arange(batch.num_tokens, dtype=torch.int32, device=self.runner.device)
        )
        for row, slot in enumerate(batch.slots.tolist()):
            start, end = batch.host["qo_indptr"][row : row + 2]
            self._logits.setdefault(slot, []).append(logits[start:end].clone())
            self.computed[slot] = self.computed.get(slot, 0) + len(tokens[slot])

    def roll_back(self, slot: int, num_tokens: int) -> None:
        """Forgets the last tokens of a slot, as rejected drafts are."""
        kept = self.logits(slot)[:-num_tokens]
        self._logits[slot], self.computed[slot] = [kept], self.computed[slot] - num_tokens

    def logits(self, slot: int) -> torch.Tensor:
        """fp32 [tokens run so far, V]; for a shared prefix only what was run in this slot."""
        return torch.cat(self._logits[slot])


def run_alone(runner: ModelRunner, tokens: Sequence[int]) -> torch.Tensor:
    """Logits [T, V] of one sequence in one step by itself."""
    run = ModelRun(runner)
    run.advance({0: tokens})
    return run.logits(0)


def random_tokens(vocab_size: int, length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab_size, (length,), generator=generator).tolist()
