"""Files that are whole or absent have the permissions of any other file."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from sonar_engine.files import replacing, write_json


@pytest.fixture(params=[0o022, 0o027, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def permissions(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_tensors_and_texts_are_ordinary_files_by_the_umask(tmp_path: Path, umask: int) -> None:
    tensors, text = tmp_path / "model.safetensors", tmp_path / "config.json"
    with replacing(tensors) as part:
        save_file({"a": torch.zeros(3)}, part)
    write_json(text, {})
    assert permissions(tensors) == permissions(text) == 0o666 & ~umask


def test_what_a_killed_writer_left_has_no_influence(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    left = tmp_path / ".config.json.part"
    left.write_text("half of it")
    left.chmod(0o600)
    with replacing(path) as part:
        assert part == left
        assert part.read_text() == ""
    fresh = tmp_path / "fresh"
    fresh.touch()
    assert permissions(path) == permissions(fresh)
    assert not left.exists()
