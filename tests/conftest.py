"""Fixtures shared by the tests: tiny checkpoints on disk and engines built on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sonar_engine.config import EngineConfig
from sonar_engine.engine import Engine, build_engine
from tiny_models import make_tiny
from training_runs import make_states

BuildEngine = Callable[..., Engine]
MATRIX_ROWS = pytest.StashKey[list[tuple[str, ...]]]()
MATRIX_HEAD = ("dtype", "drafter", "scenario", "requests", "tokens", "drafted", "acceptance length")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--matrix", choices=("slice", "full"), default="slice", help="how much tests/matrix runs")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """What the matrix compared, a line a cell."""
    rows = config.stash.get(MATRIX_ROWS, [])
    if not rows:
        return
    widths = [max(len(row[column]) for row in [MATRIX_HEAD, *rows]) for column in range(len(MATRIX_HEAD))]
    terminalreporter.section("equal to the engine without speculation")
    for row in [MATRIX_HEAD, *rows]:
        terminalreporter.write_line("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random SmolLM-shaped model with a tokenizer and a chat template, fp32."""
    return make_tiny("smollm", tmp_path_factory.mktemp("tiny"), tokenizer=True)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama 2 of two layers, fp32, without a tokenizer. Read only: who damages it takes a copy."""
    return make_tiny("llama2", tmp_path_factory.mktemp("llama"), num_hidden_layers=2)


@pytest.fixture
def build_tiny(tiny_folder: Path) -> Iterator[BuildEngine]:
    """Builds engines on the tiny model; every one is checked and closed at the end of the test.

    fp32 and small limits unless overridden. Afterwards no request may hold a page.
    """
    engines: list[Engine] = []

    def build(**options: Any) -> Engine:
        defaults: dict[str, Any] = {
            "model": str(tiny_folder),
            "dtype": "float32",
            "device": "cpu",
            "batch_invariant": True,
            "num_threads": 1,
            "max_model_len": 256,
            "max_num_seqs": 16,
            "max_num_batched_tokens": 256,
            "kv_cache_tokens": 4096,
            "page_size": 4,
        }
        engine = build_engine(EngineConfig(**{**defaults, **options}))
        engines.append(engine)
        return engine

    yield build
    for engine in engines:
        engine.check_integrity()
        assert engine.stats().kv_cache_usage == 0
        engine.close()


@pytest.fixture(scope="session")
def tiny_states(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with texts of the tiny model (`data`) and their hidden states (`states`)."""
    folder = tmp_path_factory.mktemp("training")
    make_states(tiny_folder, folder)
    return folder
