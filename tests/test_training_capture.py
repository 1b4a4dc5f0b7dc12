"""`sonar train capture`: the states are the target's, and a run that was killed leaves the same files as one that was
not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from sonar_engine import files
from sonar_engine.errors import StorageError, TrainingError
from sonar_engine.training import capture
from sonar_engine.training.capture import capture_texts
from sonar_engine.training.data import make_texts
from sonar_engine.training.journal import Journal
from sonar_engine.training.shards import CapturedTexts, ShardIndex
from sonar_engine.training.texts import read_texts
from tiny_models import make_tiny, transformers_model
from training_runs import capture_config, data_config, killed_at, make_states, quiet, with_another_tokenizer


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((folder / "states").iterdir())}


@pytest.mark.parametrize("batched_tokens", [512, 23])
def test_states_are_the_targets_last_ones(tiny_folder: Path, tmp_path: Path, batched_tokens: int) -> None:
    """Also where prompts come in chunks, side by side."""
    make_texts(data_config(tiny_folder, tmp_path), quiet)
    capture_texts(capture_config(tiny_folder, tmp_path, max_num_batched_tokens=batched_tokens), quiet, quiet)
    reference, captured = transformers_model(tiny_folder), CapturedTexts((tmp_path / "states",))
    texts = list(read_texts(tmp_path / "data"))
    assert len(captured) == len(texts) > 10
    for index, text in enumerate(texts):
        tokens = torch.from_numpy(text.tokens)
        assert torch.equal(captured.tokens(index), tokens)
        assert captured.prompt_lens[index] == text.prompt_len
        wanted = reference.model(tokens[None].long()).last_hidden_state[0]
        torch.testing.assert_close(captured.hidden(index)[:-1], wanted[:-1], rtol=1e-3, atol=1e-3)
        assert not captured.hidden(index)[-1].any()


def test_states_have_the_dtype_they_were_computed_in(tiny_folder: Path, tmp_path: Path) -> None:
    make_texts(data_config(tiny_folder, tmp_path, tokens=50, dtype="bfloat16"), quiet)
    capture_texts(capture_config(tiny_folder, tmp_path, dtype="bfloat16"), quiet, quiet)
    assert CapturedTexts((tmp_path / "states",)).hidden(0).dtype == torch.bfloat16


def test_the_disk_use_is_told_beforehand_and_true(tiny_folder: Path, tmp_path: Path) -> None:
    make_texts(data_config(tiny_folder, tmp_path), quiet)
    said: list[str] = []
    index = capture_texts(capture_config(tiny_folder, tmp_path), quiet, said.append)
    assert said == [f"{index.num_texts} texts, {index.num_tokens:,} tokens, 0.00 GiB in {tmp_path / 'states'}"]
    size = sum(len(data) for name, data in contents(tmp_path).items() if name.endswith(".safetensors"))
    told = index.num_tokens * (4 * 144 + 8)
    assert told * 0.98 < size < told * 1.05


def cut_index(folder: Path, shards: int) -> None:
    """As it was when only the first `shards` files were whole."""
    path = folder / "states" / "index.json"
    full = json.loads(path.read_text())
    for shard in full["shards"][shards:]:
        part = folder / "states" / shard["file"]
        part.write_bytes(part.read_bytes()[: part.stat().st_size // 2])  # torn
    from sonar_engine.training.shards import texts_digest

    texts, digest = list(read_texts(folder / "data")), texts_digest([])
    for shard in full["shards"][:shards]:
        group, texts = texts[: shard["num_texts"]], texts[shard["num_texts"] :]
        digest = texts_digest(group, digest)
    path.write_text(json.dumps(full | {"shards": full["shards"][:shards], "texts_sha256": digest}))


@pytest.mark.parametrize("shards", [0, 1, 2])
def test_a_killed_capture_goes_on_and_ends_with_the_same_files(
    tiny_folder: Path, tiny_states: Path, tmp_path: Path, shards: int
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(tiny_states, folder)
    whole = contents(folder)
    cut_index(folder, shards)
    (folder / "states" / ".states-00001.safetensors.part").write_bytes(b"torn")
    capture_texts(capture_config(tiny_folder, folder), quiet, quiet)
    assert contents(folder) == whole
    assert len(whole) > 3


def test_a_kill_between_a_file_and_its_index_entry_costs_that_file_only(
    tiny_folder: Path, tiny_states: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(tiny_states / "data", folder / "data")
    with killed_at(capture, "write_shard", 2):
        capture_texts(capture_config(tiny_folder, folder), quiet, quiet)
    assert len(ShardIndex.read(folder / "states").shards) == 1
    capture_texts(capture_config(tiny_folder, folder), quiet, quiet)
    assert contents(folder) == contents(tiny_states)


def test_texts_that_came_later_are_captured_later(tiny_folder: Path, tmp_path: Path) -> None:
    make_states(tiny_folder, tmp_path, tokens=200)
    before = ShardIndex.read(tmp_path / "states")
    make_states(tiny_folder, tmp_path, tokens=500)
    after = ShardIndex.read(tmp_path / "states")
    assert after.shards[: len(before.shards)] == before.shards
    assert after.num_texts == len(list(read_texts(tmp_path / "data"))) > before.num_texts


def test_states_kept_while_answering_are_those_of_a_capture(
    tiny_folder: Path, tiny_states: Path, tmp_path: Path
) -> None:
    """The very same files, also where the run is killed between texts and states, and where the batch is another."""

    config = data_config(tiny_folder, tmp_path, states=tmp_path / "states", shard_tokens=300)
    with killed_at(Journal, "append", 9):
        make_texts(config, quiet)
    assert len(list(read_texts(config.out))) == 9
    assert ShardIndex.read(tmp_path / "states").num_texts < 8
    make_texts(config.model_copy(update={"max_num_seqs": 3}), quiet)
    assert contents(tmp_path) == contents(tiny_states)
    assert (tmp_path / "data" / "texts.jsonl").read_bytes() == (tiny_states / "data" / "texts.jsonl").read_bytes()
    assert capture_texts(capture_config(tiny_folder, tmp_path), quiet, quiet).num_texts > 8
    assert contents(tmp_path) == contents(tiny_states)


# Errors.


def test_texts_of_another_target_are_refused(tiny_folder: Path, tmp_path: Path) -> None:
    make_texts(data_config(tiny_folder, tmp_path, tokens=50), quiet)
    other = make_tiny("smollm", tmp_path / "other", seed=9, tokenizer=True)
    with pytest.raises(TrainingError, match=r"belongs to another target .*: its weights differ"):
        capture_texts(capture_config(other, tmp_path), quiet, quiet)
    assert not (tmp_path / "states").exists()


def test_another_tokenizer_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    make_texts(data_config(tiny_folder, tmp_path, tokens=50), quiet)
    other = with_another_tokenizer(tiny_folder, tmp_path / "other")
    with pytest.raises(TrainingError, match="its tokenizer differ"):
        capture_texts(capture_config(other, tmp_path), quiet, quiet)


def change_texts(folder: Path) -> None:
    path = folder / "data" / "texts.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))


def damage_index(folder: Path) -> None:
    (folder / "states" / "index.json").write_text('{"shards": []}')


def remove_manifest(folder: Path) -> None:
    (folder / "data" / "manifest.json").unlink()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (change_texts, "holds float32 states of other texts"),
        (damage_index, "index.json is damaged"),
        (remove_manifest, "manifest.json is missing; make it with `sonar train data`"),
    ],
)
def test_what_does_not_belong_together_is_refused(
    tiny_folder: Path, tiny_states: Path, tmp_path: Path, change: Callable[[Path], None], complaint: str
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(tiny_states, folder)
    change(folder)
    before = contents(folder)
    with pytest.raises((TrainingError, StorageError), match=complaint):
        capture_texts(capture_config(tiny_folder, folder), quiet, quiet)
    assert contents(folder) == before


def test_a_changed_byte_is_found_by_the_checksum(tiny_states: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(tiny_states, folder)
    path = folder / "states" / "states-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(TrainingError, match=r"states-00001.safetensors is damaged: its checksum"):
        CapturedTexts((folder / "states",))


def test_too_little_room_is_an_error_before_anything_is_written(
    tiny_folder: Path, tiny_states: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(tiny_states / "data", folder / "data")
    usage = shutil.disk_usage(folder)
    monkeypatch.setattr(files.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(StorageError, match=r"the capture needs 0.00 GiB"):
        capture_texts(capture_config(tiny_folder, folder), quiet, quiet)
    assert not list((folder / "states").glob("*.safetensors"))
