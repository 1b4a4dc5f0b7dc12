"""`make demo`, on the tiny model: with a head for it both speeds side by side, without one n-gram drafting."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from sonar_engine import demo
from sonar_engine.config import EngineConfig
from sonar_engine.drafters import shipped
from sonar_engine.models.registry import resolve_model
from sonar_engine.tokenizer import load_tokenizer
from sonar_engine.training.identity import TRAINED_FOR, TargetIdentity
from tiny_heads import make_copied_head


@pytest.fixture(params=["head", "none"])
def report(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[bool, str]:
    """Whether a head came with the model, and what the demo printed."""
    heads = tmp_path / "heads"
    heads.mkdir()
    target, head = make_copied_head(tmp_path)
    if request.param == "head":
        resolved = resolve_model(str(target))
        path = head / "config.json"
        identity = TargetIdentity.of(resolved, load_tokenizer(resolved)).to_dict()
        path.write_text(
            json.dumps(json.loads(path.read_text()) | {TRAINED_FOR: identity, "training": {"num_steps": 2}})
        )
        head.rename(heads / "tiny")
    limits = {"max_model_len": 512, "max_num_seqs": 2, "num_threads": 1, "dtype": "float32", "device": "cpu"}
    monkeypatch.setattr(shipped, "HEADS", heads)
    monkeypatch.setattr(demo, "EngineConfig", lambda: EngineConfig(model=str(target), **limits))
    demo.main()
    return request.param == "head", capsys.readouterr().out


def test_both_speeds_acceptance_and_same_tokens_are_shown(report: tuple[bool, str]) -> None:
    has_head, out = report
    assert re.search(r"^speculation off +\d+ tokens/s$", out, re.MULTILINE)
    assert bool(re.search(r"^MTP head +\d+ tokens/s, [\d.]+ times as fast$", out, re.MULTILINE)) == has_head
    assert bool(re.search(r"^n-gram drafting +\d+ tokens/s", out, re.MULTILINE)) != has_head
    assert re.search(r"^output +the same tokens$", out, re.MULTILINE)
    assert ("--spec-method none turns it off" in out) == has_head
    if has_head:  # always right behind the window
        assert float(re.findall(r"^acceptance length +([\d.]+) ", out, re.MULTILINE)[0]) > 2.5
        assert len(re.findall(r"^by position +([\d. ]+)$", out, re.MULTILINE)[0].split()) == 2


def test_positions_count_all_steps_that_drafted() -> None:
    assert demo.accepted_by_position([[2, 1, 1], [4, 0, 0, 2]]) == [0.4, 0.3, 0.2]
    assert demo.accepted_by_position([[], []]) == []
