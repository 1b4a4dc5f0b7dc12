"""What is trained is what serves: the trainer's forward pass equals the engine's, in every draft step."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import BuildEngine
from head_watch import drafter_of, drafting, loaded
from sonar_engine.engine import Engine
from sonar_engine.models.model_config import ModelConfig
from sonar_engine.training.packing import PackedBatch, build_batch
from sonar_engine.training.recursion import run_recursion
from sonar_engine.training.shards import CapturedTexts
from sonar_engine.training.trainer import load_constants
from sonar_engine.types import SamplingParams
from test_mtp import HEADS
from tiny_heads import make_head
from tiny_models import make_tiny
from training_runs import make_states

K = 3


@dataclass
class Forced:
    """Makes an engine draft known texts, and keeps the logits of every draft by (text, start slot, draft step)."""

    engine: Engine
    texts: dict[int, list[int]]  # by request id
    logits: dict[tuple[int, int, int], torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._owners: dict[int, int] = {}
        drafter = drafter_of(self.engine)
        self._admit = drafter.admit
        drafter.admit = self.admit  # type: ignore[method-assign]
        drafter._sampler.choose = self.choose  # type: ignore[method-assign]

    def admit(self, slot: int, request_id: int, speculate: int) -> None:
        self._admit(slot, request_id, speculate)
        self._owners[slot] = request_id

    def choose(self, logits: torch.Tensor, slots: np.ndarray, output_pos: np.ndarray, step: int) -> torch.Tensor:
        tokens = []
        for row, (slot, position) in enumerate(zip(slots.tolist(), output_pos.tolist(), strict=True)):
            request_id = self._owners[slot]
            text, start = self.texts[request_id], self.starts[request_id] + position - 2
            self.logits[request_id, start, step] = logits[row].clone()
            tokens.append(text[start + step + 2] if start + step + 2 < len(text) else 0)
        return torch.tensor(tokens, dtype=torch.int32)

    def run(self, prompts: dict[int, list[int]]) -> None:
        """Greedily, all at once; the engine's texts must be the known ones."""
        self.starts = {request_id: len(prompt) for request_id, prompt in prompts.items()}
        for request_id, prompt in prompts.items():
            length = len(self.texts[request_id]) - len(prompt)
            params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
            self.engine.submit(request_id, prompt, params)
        while self.engine.has_work():
            self.engine.step()


def greedy_texts(folder: Path) -> CapturedTexts:
    return CapturedTexts((folder / "states",))


@pytest.fixture(scope="module")
def greedy_states(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts at temperature 0, which an engine will write again."""
    folder = tmp_path_factory.mktemp("greedy")
    make_states(tiny_folder, folder, temperature=(0.0,))
    return folder


def pass_over(batch: PackedBatch, head: Any, target: Path, token_map: torch.Tensor | None) -> torch.Tensor:
    """The trainer's logits [K, B, M, W]."""
    ids = None if token_map is None else token_map.long()
    embedding, output = load_constants(
        target, ModelConfig.load(target), ids, served=torch.float32, compute=torch.float32, device=torch.device("cpu")
    )
    with torch.no_grad():
        states, _ = run_recursion(head, embedding, batch, K, torch.float32)
        return states @ output.rows.T


@pytest.mark.parametrize("kind", HEADS)
def test_logits_of_every_draft_step_are_the_engines(
    build_tiny: BuildEngine, tiny_folder: Path, greedy_states: Path, tmp_path: Path, kind: str
) -> None:
    """Texts packed several a row in the trainer; in the engine drafted side by side, in pages of 4 tokens."""
    head_folder = make_head(tiny_folder, tmp_path / "head", **HEADS[kind])
    texts = greedy_texts(greedy_states)
    # Without norms scores grow to 1e4, where softmax turns rounding into more.
    check_against_engine(build_tiny, tiny_folder, head_folder, texts, 1e-3 if kind == "no norms" else 1e-4)


def test_logits_are_the_engines_where_layers_see_a_window(build_tiny: BuildEngine, tmp_path: Path) -> None:
    target = make_tiny("mistral_window", tmp_path / "target", tokenizer=True, sliding_window=7)
    make_states(target, tmp_path, temperature=(0.0,))
    head_folder = make_head(target, tmp_path / "head", num_layers=2)
    check_against_engine(build_tiny, target, head_folder, greedy_texts(tmp_path))


def check_against_engine(
    build_tiny: BuildEngine, target: Path, head_folder: Path, texts: CapturedTexts, tolerance: float = 1e-4
) -> None:
    known = {index + 1: texts.tokens(index).tolist() for index in range(len(texts))}
    prompts = {index + 1: known[index + 1][: texts.prompt_lens[index]] for index in range(len(texts))}
    engine = build_tiny(model=str(target), speculative=drafting(head_folder, K))
    forced = Forced(engine, known)
    forced.run(prompts)
    batch = build_batch(texts, [[0, 1, 2], [3], list(range(4, len(texts)))], 2048)
    ours = pass_over(batch, *split_head(head_folder, target))
    offsets = {}
    for row, ids in enumerate([[0, 1, 2], [3], list(range(4, len(texts)))]):
        at = 0
        for index in ids:
            offsets[index], at = (row, at), at + texts.length(index)
    columns = {
        (row, slot): column
        for row in range(len(batch.slots))
        for column, slot in enumerate(batch.slots[row].tolist())
        if batch.lasts[row, column] >= 0
    }
    compared = 0
    for (request_id, start, step), logits in forced.logits.items():
        if start + step + 2 >= len(known[request_id]):
            continue
        row, offset = offsets[request_id - 1]
        difference = (ours[step, row, columns[row, offset + start]] - logits).abs().max()
        assert difference < tolerance * logits.abs().max() + 1e-4
        compared += 1
    assert compared > 100
    stats = engine.stats()
    assert stats.num_accepted_tokens > 0.9 * stats.num_draft_tokens


def split_head(head_folder: Path, target: Path) -> tuple[Any, Path, torch.Tensor | None]:
    head, token_map = loaded(head_folder, target)
    return head, target, token_map


@pytest.mark.parametrize("kind", ["default", "two layers"])
def test_a_packed_text_gives_what_it_gives_alone(
    tiny_folder: Path, tiny_states: Path, tmp_path: Path, kind: str
) -> None:
    head, target, token_map = split_head(make_head(tiny_folder, tmp_path / "head", **HEADS[kind]), tiny_folder)
    texts = CapturedTexts((tiny_states / "states",))
    packed = build_batch(texts, [[3, 0, 2], [1], []], 512)
    together = pass_over(packed, head, target, token_map)
    for index in range(4):
        alone = build_batch(texts, [[index]], texts.length(index))
        mine = packed.text_ids == index
        length = int(mine.sum())
        assert length == alone.slots.shape[1] > 0
        single = pass_over(alone, head, target, token_map)[:, 0]
        for step in range(K):
            torch.testing.assert_close(
                together[step][mine][: length - step], single[step][: length - step], rtol=1e-4, atol=1e-4
            )
