"""`sonar train data`: prompts of every kind, and texts that come out the same however often the run is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from sonar_engine.errors import SonarError, StorageError, TrainingError
from sonar_engine.models.registry import resolve_model
from sonar_engine.tokenizer import load_tokenizer
from sonar_engine.training.data import make_texts
from sonar_engine.training.journal import Journal, read_journal
from sonar_engine.training.prompts import UserTurn, read_prompt_files
from sonar_engine.training.texts import read_texts
from tiny_models import make_tiny
from training_runs import data_config, files_end_at, quiet


def texts_of(folder: Path) -> bytes:
    return (folder / "data" / "texts.jsonl").read_bytes()


def prompt_file(folder: Path, *rows: Any) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


# Prompts.


def test_every_kind_of_row_gives_its_prompt(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    path = prompt_file(
        tmp_path,
        {"messages": [*chat, {"role": "assistant", "content": "Because."}]},
        {"prompt": "One."},
        {"question": "Two?", "answer": "2"},
        {"turns": ["Three.", "Four."], "category": "writing"},
        {"instruction": "Five.", "instances": [{"input": "5", "output": "V"}]},
        {"instruction": "Six.", "instances": [{"input": "", "output": "VI"}]},
    )
    text = tmp_path / "plain.txt"
    text.write_text("Seven.\nStill seven.\n\n\nEight.\n")
    prompts = read_prompt_files((path, text))
    assert prompts[0].messages == tuple(chat)
    contents = [prompt.messages[-1]["content"] for prompt in prompts[1:]]
    assert contents == ["One.", "Two?", "Three.", "Five.\n\n5", "Six.", "Seven.\nStill seven.", "Eight."]
    assert [prompt.task for prompt in prompts] == ["rows"] * 3 + ["writing"] + ["rows"] * 2 + ["plain"] * 2
    assert prompts[3].source == "rows.jsonl:4"


@pytest.mark.parametrize(
    ("row", "complaint"),
    [("{", "rows.jsonl:1: not JSON"), ("[1]", "must be an object"), ('{"text": "x"}', "rows.jsonl:1: no prompt")],
)
def test_a_row_without_a_prompt_is_named(tmp_path: Path, row: str, complaint: str) -> None:
    (tmp_path / "rows.jsonl").write_text(row)
    with pytest.raises(TrainingError, match=complaint):
        read_prompt_files((tmp_path / "rows.jsonl",))


def test_files_that_cannot_be_prompts_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n\n")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    for name, complaint in (("empty.txt", "no prompts"), ("binary.txt", "not UTF-8"), ("none.txt", "No such file")):
        with pytest.raises(TrainingError, match=complaint):
            read_prompt_files((tmp_path / name,))


def test_own_prompts_are_sampled_from_the_bare_user_turn(tiny_folder: Path) -> None:
    tokenizer = load_tokenizer(resolve_model(str(tiny_folder)))
    turn = UserTurn.of(tokenizer)
    assert tokenizer.decode(turn.prefix, skip_special_tokens=False) == "<|im_start|>user\n"
    assert turn.stop_ids == [2]
    with_words = tokenizer.apply_chat_template([{"role": "user", "content": "the cat"}])
    assert with_words[: len(turn.prefix)] == turn.prefix


# Texts.


def test_texts_answer_the_prompts_of_the_files_and_the_targets_own(tiny_folder: Path, tmp_path: Path) -> None:
    config = data_config(tiny_folder, tmp_path, temperature=(0.0, 1.0))
    manifest = make_texts(config, quiet)
    tokenizer = load_tokenizer(resolve_model(str(tiny_folder)))
    texts = list(read_texts(config.out))
    assert [text.index for text in texts] == sorted({text.index for text in texts})
    assert {text.source for text in texts} == {"self", "prompts.txt:1", "prompts.txt:2", "prompts.txt:3"}
    prefix = tokenizer.encode("<|im_start|>user\n", add_special_tokens=False)
    for text in texts:
        prompt = text.tokens[: text.prompt_len].tolist()
        assert prompt[: len(prefix)] == prefix
        assert tokenizer.decode(prompt, skip_special_tokens=False).endswith("<|im_end|>\n<|im_start|>assistant\n")
        assert text.num_answer_tokens == 30 or text.tokens[-1] == 2
    assert len({text.tokens.tobytes() for text in texts}) == len(texts)
    assert len({(text.source == "self", text.temperature) for text in texts}) == 4
    counts = manifest["counts"]
    assert counts["texts"] == len(texts) == sum(counts["texts_by_source"].values())
    assert counts["answer_tokens"] == sum(text.num_answer_tokens for text in texts) >= config.tokens
    assert manifest["target"]["name"] == str(tiny_folder)
    assert json.loads((config.out / "manifest.json").read_text()) == manifest


def test_answers_at_temperature_0_are_the_engines_greedy_ones(tiny_folder: Path, tmp_path: Path, build_tiny) -> None:
    config = data_config(tiny_folder, tmp_path, temperature=(0.0,), self_share=0.0)
    make_texts(config, quiet)
    texts = list(read_texts(config.out))
    assert len(texts) == 3
    from sonar_engine.types import SamplingParams

    for text in texts:
        prompt = text.tokens[: text.prompt_len].tolist()
        (completion,) = build_tiny().generate([prompt], SamplingParams(temperature=0.0, max_tokens=30))
        assert completion.token_ids == text.tokens[text.prompt_len :].tolist()


def test_rounds_give_other_answers_to_the_same_prompts_and_none_twice(tiny_folder: Path, tmp_path: Path) -> None:
    config = data_config(tiny_folder, tmp_path, self_share=0.0, rounds=4, tokens=100_000)
    manifest = make_texts(config, quiet)
    assert manifest["counts"]["texts"] == 12
    again = config.model_copy(update={"temperature": (0.0,), "out": tmp_path / "greedy"})
    assert make_texts(again, quiet)["counts"]["texts"] == 3


def test_without_files_the_target_writes_all_prompts(tiny_folder: Path, tmp_path: Path) -> None:
    config = data_config(tiny_folder, tmp_path, prompts=(), tokens=100)
    assert list(make_texts(config, quiet)["counts"]["texts_by_source"]) == ["self"]


def test_the_batch_has_no_influence_on_the_texts(tiny_folder: Path, tmp_path: Path) -> None:
    make_texts(data_config(tiny_folder, tmp_path / "a"), quiet)
    make_texts(data_config(tiny_folder, tmp_path / "b", max_num_seqs=2, max_num_batched_tokens=16), quiet)
    make_texts(data_config(tiny_folder, tmp_path / "c", seed=1), quiet)
    assert texts_of(tmp_path / "a") == texts_of(tmp_path / "b")
    assert texts_of(tmp_path / "a") != texts_of(tmp_path / "c")


def test_a_run_goes_on_from_whatever_byte_it_was_killed_at(tiny_folder: Path, tmp_path: Path) -> None:
    config = data_config(tiny_folder, tmp_path)
    manifest = make_texts(config, quiet)
    whole = texts_of(tmp_path)
    for size in (0, 1, len(whole) // 3, len(whole) // 2, len(whole) - 1):
        (config.out / "texts.jsonl").write_bytes(whole[:size])
        assert make_texts(config, quiet) == manifest
        assert texts_of(tmp_path) == whole


def test_a_finished_run_is_extended_by_asking_for_more_tokens(tiny_folder: Path, tmp_path: Path) -> None:
    make_texts(data_config(tiny_folder, tmp_path / "short", tokens=200), quiet)
    make_texts(data_config(tiny_folder, tmp_path / "short", tokens=600), quiet)
    make_texts(data_config(tiny_folder, tmp_path / "long", tokens=600), quiet)
    assert texts_of(tmp_path / "short") == texts_of(tmp_path / "long")


def test_kill_9_and_a_second_start_give_the_same_texts(tiny_folder: Path, tmp_path: Path) -> None:
    config = data_config(tiny_folder, tmp_path, tokens=3000)
    code = (
        "import sys; from training_runs import quiet; from sonar_engine.training.config import DataConfig;"
        "from sonar_engine.training.data import make_texts;"
        "make_texts(DataConfig.model_validate_json(sys.argv[1]), quiet)"
    )
    command = [sys.executable, "-c", code, config.model_dump_json()]
    process = subprocess.Popen(command, cwd=Path(__file__).parent, env=os.environ)
    texts = config.out / "texts.jsonl"
    deadline = time.monotonic() + 120
    while (not texts.exists() or texts.stat().st_size < 2000) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    interrupted = texts_of(tmp_path)
    make_texts(config, quiet)
    make_texts(data_config(tiny_folder, tmp_path / "other", tokens=3000), quiet)
    assert 0 < len(interrupted) < len(texts_of(tmp_path))
    assert texts_of(tmp_path) == texts_of(tmp_path / "other")


# Errors.


def test_a_folder_of_other_settings_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    config = data_config(tiny_folder, tmp_path, tokens=50)
    make_texts(config, quiet)
    before = texts_of(tmp_path)
    for change in ({"seed": 3}, {"temperature": (0.5,)}, {"max_answer_tokens": 20}):
        with pytest.raises(TrainingError, match=f"was begun with {next(iter(change))}="):
            make_texts(config.model_copy(update=change), quiet)
    assert texts_of(tmp_path) == before


def test_a_folder_of_another_target_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    make_texts(data_config(tiny_folder, tmp_path, tokens=50), quiet)
    other = make_tiny("smollm", tmp_path / "other", seed=9, tokenizer=True)
    with pytest.raises(TrainingError, match=r"belongs to another target .*: its weights differ"):
        make_texts(data_config(other, tmp_path, tokens=50), quiet)


def test_a_target_without_a_chat_template_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    other = make_tiny("smollm", tmp_path / "other", tokenizer=True)
    (other / "chat_template.jinja").unlink()
    with pytest.raises(TrainingError, match="no chat template"):
        make_texts(data_config(other, tmp_path), quiet)


def test_a_damaged_line_in_the_middle_is_named(tiny_folder: Path, tmp_path: Path) -> None:
    config = data_config(tiny_folder, tmp_path, tokens=50)
    make_texts(config, quiet)
    (config.out / "texts.jsonl").write_bytes(b'{"index": 0}\n' + texts_of(tmp_path))
    with pytest.raises(SonarError, match=r"texts.jsonl:1: must have index"):
        make_texts(config, quiet)


def test_a_full_disk_leaves_whole_lines(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "lines.jsonl")
    with files_end_at(100):
        journal.append({"text": "x" * 60})
        with pytest.raises(StorageError, match=r"lines.jsonl cannot be written: File too large"):
            journal.append({"text": "y" * 60})
    journal.append({"text": "z"})
    journal.close()
    assert list(read_journal(tmp_path / "lines.jsonl")) == [{"text": "x" * 60}, {"text": "z"}]
