"""The command `sonar`, run in this process on a tiny model."""

from __future__ import annotations

import io
import json
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from sonar_engine import __version__
from sonar_engine.cli import main
from sonar_engine.cli.options import config_options
from sonar_engine.config import EngineConfig
from sonar_engine.errors import StaleStepError
from sonar_engine.server.config import ServerConfig

SMALL = [
    "--max-model-len",
    "256",
    "--kv-cache-tokens",
    "2048",
    "--dtype",
    "fp32",
    "--device",
    "cpu",
    "--num-threads",
    "1",
]


class Sonar:
    """Runs the command as a shell would and keeps what it printed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capsys = capsys
        self.out = ""
        self.err = ""

    def __call__(self, *arguments: str) -> int:
        self._monkeypatch.setattr(sys, "argv", ["sonar", *arguments])
        code: Any = 0
        try:
            main()
        except SystemExit as end:
            code = end.code
        self.out, self.err = self._capsys.readouterr()
        return int(code or 0)

    def json_lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]


@pytest.fixture
def sonar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Sonar:
    return Sonar(monkeypatch, capsys)


@pytest.fixture
def tiny(tiny_folder: Path) -> list[str]:
    return ["--model", str(tiny_folder), *SMALL]


def prompts_file(folder: Path, *lines: str) -> str:
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def assert_one_line_error(sonar: Sonar, *parts: str) -> None:
    assert sonar.err.startswith("error: ")
    assert sonar.err.count("\n") == 1
    for part in parts:
        assert part in sonar.err


# The command itself


def test_the_version_is_printed(sonar: Sonar):
    assert sonar("--version") == 0
    assert sonar.out == f"sonar {__version__}\n"


@pytest.mark.parametrize("arguments", [["--nonsense"], ["generate", "--nonsense"], ["bench", "nonsense"], ["nonsense"]])
def test_wrong_usage_ends_with_code_2(sonar: Sonar, arguments: list[str]):
    assert sonar(*arguments) == 2


@pytest.mark.parametrize(
    "command",
    ["serve", "generate", "chat", "verify", "bench scheduler", "bench latency", "bench overlap", "models pull"],
)
def test_every_command_explains_itself(sonar: Sonar, command: str):
    assert sonar(*command.split(), "--help") == 0
    assert "Usage: sonar" in sonar.out


def test_every_option_has_a_description():
    for model in (EngineConfig, ServerConfig):
        undescribed = [name for name, field in model.model_fields.items() if not field.description]
        assert undescribed in ([], ["speculative"])


def test_a_command_of_its_own_option_hides_the_configuration_option():
    @config_options(EngineConfig, without=("dtype",))
    def command(*, seed: int = 3, **options: Any) -> None: ...

    names = [*command.__signature__.parameters]  # type: ignore[attr-defined]
    assert names.count("seed") == 1
    assert "dtype" not in names
    assert "page_size" in names


# generate


def test_generated_objects_have_the_documented_shape(sonar: Sonar, tiny: list[str], tmp_path: Path):
    file = prompts_file(tmp_path, '{"prompt": "ab"}', "", '{"messages": [{"role": "user", "content": "hello"}]}')
    assert sonar("generate", *tiny, "--prompts", file, "--max-tokens", "5", "--ignore-eos", "--json") == 0
    first, second = sonar.json_lines()
    keys = ["index", "text", "prompt_token_ids", "token_ids", "finish_reason", "usage", "metrics"]
    assert list(first) == list(second) == keys
    assert (first["index"], second["index"]) == (0, 1)
    assert len(first["token_ids"]) == 5
    assert first["finish_reason"] == "length"
    num_prompt = len(first["prompt_token_ids"])
    assert first["usage"]["prompt_tokens"] == num_prompt
    assert first["usage"]["completion_tokens"] == 5
    assert first["usage"]["total_tokens"] == num_prompt + 5
    timings = {"time_to_first_token_ms", "queue_time_ms", "tokens_per_second", "speculative_decoding"}
    assert set(first["metrics"]) == timings
    assert len(second["prompt_token_ids"]) > num_prompt  # the chat template was applied


def test_one_prompt_streams_the_same_text_as_its_object_holds(sonar: Sonar, tiny: list[str]):
    command = ["generate", *tiny, "--prompt", "ab", "--temperature", "0", "--max-tokens", "8"]
    assert sonar(*command, "--json") == 0
    text = sonar.json_lines()[0]["text"]
    assert sonar(*command) == 0
    assert sonar.out == text + "\n"


def test_several_prompts_print_their_texts_by_number(sonar: Sonar, tiny: list[str]):
    assert sonar("generate", *tiny, "--prompt", "ab", "--prompt", "cd", "--max-tokens", "2", "--ignore-eos") == 0
    assert "[0]\n" in sonar.out and "[1]\n" in sonar.out


def test_chat_puts_a_prompt_through_the_template(sonar: Sonar, tiny: list[str]):
    command = ["generate", *tiny, "--prompt", "ab", "--max-tokens", "1", "--json"]
    assert sonar(*command) == 0
    plain = sonar.json_lines()[0]["prompt_token_ids"]
    assert sonar(*command, "--chat") == 0
    assert len(sonar.json_lines()[0]["prompt_token_ids"]) > len(plain)


def test_a_seed_gives_the_same_tokens_with_and_without_ngram_drafts(sonar: Sonar, tiny: list[str]):
    command = ["generate", *tiny, "--prompt", "ab ab ab", "--seed", "7", "--max-tokens", "40", "--ignore-eos", "--json"]
    assert sonar(*command) == 0
    plain = sonar.json_lines()[0]
    assert sonar(*command, "--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}') == 0
    drafted = sonar.json_lines()[0]
    assert drafted["token_ids"] == plain["token_ids"]
    assert plain["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ([], "no prompt; give --prompt"),
        (["--prompt", ""], "empty"),
        (["--prompt", "ab " * 300], "256"),
        (["--prompt", "ab", "--temperature", "-1"], "temperature"),
        (["--prompt", "ab", "--top-p", "0"], "top_p"),
        (["--prompt", "ab", "--max-tokens", "0"], "max_tokens"),
        (["--prompt", "ab", "--page-size", "0"], "--page-size"),
        (["--prompt", "ab", "--speculative-config", "{"], "--speculative-config"),
        (["--prompt", "ab", "--config", "none.yaml"], "none.yaml"),
        (["--prompts", "none.jsonl"], "none.jsonl"),
        (["--prompt", "ab", "--max-model-len", "100000"], "max_model_len"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_1(sonar: Sonar, tiny: list[str], arguments: list[str], part: str):
    assert sonar("generate", *tiny, *arguments) == 1
    assert_one_line_error(sonar, part)


@pytest.mark.parametrize(
    "line",
    ["{", "[]", '{"prompt": 3}', '{"text": "ab"}', '{"prompt": "ab", "messages": []}', '{"messages": "ab"}'],
)
def test_a_wrong_line_of_prompts_is_named(sonar: Sonar, tmp_path: Path, line: str):
    file = prompts_file(tmp_path, '{"prompt": "ab"}', line)
    assert sonar("generate", "--prompts", file) == 1
    assert_one_line_error(sonar, f"{file}:2: ", 'right: {"prompt"')


def test_a_missing_model_folder_says_what_can_be_given(sonar: Sonar):
    assert sonar("generate", "--model", "./nowhere", "--prompt", "ab") == 1
    assert_one_line_error(sonar, "nowhere", "smollm2-135m")


def test_an_unknown_architecture_is_named(sonar: Sonar, tmp_path: Path):
    (tmp_path / "config.json").write_text('{"architectures": ["FancyForCausalLM"], "model_type": "fancy"}')
    assert sonar("generate", "--model", str(tmp_path), "--prompt", "ab") == 1
    assert_one_line_error(sonar, "ancy")


# chat


def talk(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


def test_a_second_turn_finds_the_first_one_in_the_cache(sonar: Sonar, tiny: list[str], monkeypatch: pytest.MonkeyPatch):
    talk(monkeypatch, "hello there", "and again", "/exit", "never said")
    assert sonar("chat", *tiny, "--page-size", "4", "--max-tokens", "4", "--temperature", "0") == 0
    summaries = [line for line in sonar.err.splitlines() if "from the cache" in line]
    assert len(summaries) == 2
    assert ", 0 prompt tokens" in summaries[0]
    assert ", 0 prompt tokens" not in summaries[1]


def test_a_conversation_that_outgrows_the_context_can_be_reset(
    sonar: Sonar, tiny: list[str], monkeypatch: pytest.MonkeyPatch
):
    talk(monkeypatch, "word " * 300, "/reset", "hello")
    assert sonar("chat", *tiny, "--max-tokens", "4", "--temperature", "0") == 0
    assert "/reset starts anew" in sonar.err
    assert "from the cache" in sonar.err


def test_ctrl_c_ends_an_answer_and_the_conversation_goes_on(
    sonar: Sonar, tiny: list[str], monkeypatch: pytest.MonkeyPatch
):
    talk(monkeypatch, "hello", "and again")
    plain_write = sys.stdout.write
    interrupted = False

    def write(text: str) -> int:
        nonlocal interrupted
        if text and not interrupted:
            interrupted = True
            signal.raise_signal(signal.SIGINT)
        return plain_write(text)

    monkeypatch.setattr(sys.stdout, "write", write)
    assert sonar("chat", *tiny, "--max-tokens", "40", "--temperature", "0") == 0
    assert interrupted
    assert sonar.err.count("from the cache") == 1  # the answer to the second turn, which is whole


@pytest.mark.parametrize("command", [["chat"], ["generate", "--prompt", "ab"]])
@pytest.mark.parametrize(
    ("arguments", "part"),
    [(["--temperature", "-1"], "temperature"), (["--top-p", "0"], "top_p"), (["--max-tokens", "0"], "max_tokens")],
)
def test_settings_that_no_model_can_follow_are_refused_before_one_is_loaded(
    sonar: Sonar, command: list[str], arguments: list[str], part: str
):
    assert sonar(*command, "--model", "./nowhere", *arguments) == 1
    assert_one_line_error(sonar, part)
    assert "nowhere" not in sonar.err


def test_settings_beyond_the_model_end_a_chat_before_its_first_turn(
    sonar: Sonar, tiny: list[str], monkeypatch: pytest.MonkeyPatch
):
    talk(monkeypatch, "hello")
    assert sonar("chat", *tiny, "--max-tokens", "100000") == 1
    assert_one_line_error(sonar, "context length is 256 tokens", "max_tokens")
    assert sys.stdin.read() == "hello\n"


def test_a_model_without_a_chat_template_ends_a_chat_before_its_first_turn(
    sonar: Sonar, tiny: list[str], tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    shutil.copytree(tiny_folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").unlink()
    talk(monkeypatch, "hello")
    assert sonar("chat", *tiny, "--tokenizer", str(tmp_path)) == 1
    assert_one_line_error(sonar, "no chat template")
    assert sys.stdin.read() == "hello\n"


@pytest.mark.parametrize("error", [KeyboardInterrupt, StaleStepError])
def test_ctrl_c_ends_a_command_with_code_130_and_no_message(
    sonar: Sonar, tiny: list[str], monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
):
    def interrupted(*arguments: object) -> None:
        try:
            raise KeyboardInterrupt
        finally:
            raise error

    monkeypatch.setattr("sonar_engine.engine.Engine.generate", interrupted)
    assert sonar("generate", *tiny, "--prompt", "ab") == 130
    assert sonar.err == ""


# bench


def test_the_scheduler_bench_prints_one_object_for_each_setting(sonar: Sonar):
    assert sonar("bench", "scheduler", "--requests", "1,4", "--drafts", "0,3", "--steps", "10", "--json") == 0
    lines = sonar.json_lines()
    assert [(line["requests"], line["drafts"]) for line in lines] == [(1, 0), (1, 3), (4, 0), (4, 3)]
    assert all(line["us_per_step"] > 0 for line in lines)


def test_the_scheduler_bench_takes_as_many_requests_and_drafts_as_the_engine_does(sonar: Sonar):
    assert sonar("bench", "scheduler", "--requests", "4096", "--drafts", "1", "--steps", "1", "--json") == 0
    assert sonar("bench", "scheduler", "--requests", "1", "--drafts", "32", "--steps", "1", "--json") == 0


def test_the_scheduler_bench_prints_a_table(sonar: Sonar):
    assert sonar("bench", "scheduler", "--requests", "2", "--drafts", "1", "--steps", "5") == 0
    head, row = sonar.out.splitlines()
    assert head.split()[:2] == ["requests", "drafts"]
    assert row.split()[:2] == ["2", "1"]


def test_the_overlap_bench_prints_the_idle_share_and_writes_a_trace(sonar: Sonar, tmp_path: Path):
    quick = ["--requests", "3", "--drafts", "2", "--steps", "4", "--target-ms", "2", "--draft-ms", "1"]
    trace = tmp_path / "trace.json"
    for schedule in ("draft_target", "mtp"):
        options = ["--schedule", schedule, "--planning-ms", "3", "--json", "--trace", str(trace)]
        assert sonar("bench", "overlap", *quick, *options) == 0
        (line,) = sonar.json_lines()
        assert (line["schedule"], line["requests"], line["planning_ms"]) == (schedule, 3, 3.0)
        assert 0 < line["device_idle_share"] < 1  # a plan takes longer than the pass that is to hide it
        assert {event["name"] for event in json.loads(trace.read_text())["traceEvents"]} >= {"plan", "ingest"}


def test_latency_and_throughput_report_tokens_per_second_beside_transformers(sonar: Sonar, tiny: list[str]):
    options = [*tiny, "--output-len", "4", "--compare", "transformers", "--json"]
    assert sonar("bench", "latency", *options, "--repeat", "1") == 0
    (line,) = sonar.json_lines()
    assert line["tokens_per_second"] > 0
    assert line["ratio"] == pytest.approx(line["tokens_per_second"] / line["transformers_tokens_per_second"])
    assert sonar("bench", "throughput", *options, "--streams", "1,3") == 0
    assert [line["streams"] for line in sonar.json_lines()] == [1, 3]


def test_resident_memory_is_split_into_weights_cache_and_the_rest(sonar: Sonar, tiny: list[str]):
    assert sonar("bench", "latency", *tiny, "--output-len", "4", "--repeat", "1", "--rss", "--json") == 0
    (line,) = sonar.json_lines()
    assert line["rss_mb"] == pytest.approx(line["weights_mb"] + line["kv_cache_mb"] + line["other_mb"])
    assert line["weights_mb"] > 0 and line["kv_cache_mb"] > 0


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["scheduler", "--requests", "0"], "from 1 to 4096"),
        (["scheduler", "--requests", "1,4097"], "from 1 to 4096"),
        (["scheduler", "--drafts", "x"], "from 0 to 32"),
        (["scheduler", "--drafts", "33"], "from 0 to 32"),
        (["throughput", "--streams", "4097"], "from 1 to 4096"),
        (["latency", "--compare", "other"], "--compare transformers"),
        (["overlap", "--trace", "/no/such/folder/trace.json"], "there is no folder /no/such/folder"),
        (["overlap", "--trace", "/"], "is a folder"),
        (["overlap", "--planning-ms", "inf"], "--planning-ms inf"),
    ],
)
def test_a_wrong_bench_option_is_one_line(sonar: Sonar, arguments: list[str], part: str):
    assert sonar("bench", *arguments) == 1
    assert_one_line_error(sonar, arguments[1], part)


def test_a_trace_that_cannot_be_written_is_told_before_the_run(sonar: Sonar, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sonar_engine.bench.overlap.measure_overlap", lambda settings: pytest.fail("it ran"))
    assert sonar("bench", "overlap", "--trace", "/proc/trace.json") == 1
    assert_one_line_error(sonar, "/proc/trace.json cannot be written")


# models and serve


def test_models_lists_what_is_known(sonar: Sonar, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("SONAR_CACHE", str(tmp_path))
    for arguments in (["models"], ["models", "list"]):
        assert sonar(*arguments) == 0
        assert "smollm2-135m" in sonar.out
        assert "not cached" in sonar.out


def test_pulling_an_unknown_model_names_the_known_ones(sonar: Sonar):
    assert sonar("models", "pull", "nothing") == 1
    assert_one_line_error(sonar, "smollm2-135m")


def test_serve_hands_both_configurations_to_the_server(sonar: Sonar, monkeypatch: pytest.MonkeyPatch):
    seen: list[tuple[EngineConfig, ServerConfig]] = []
    monkeypatch.setattr("sonar_engine.server.run.run_server", lambda engine, server: seen.append((engine, server)) or 0)
    monkeypatch.setenv("SONAR_PORT", "9000")
    assert sonar("serve", "some/model", "--spec-method", "ngram", "--api-key", "a", "--api-key", "b") == 0
    ((engine, server),) = seen
    assert (engine.model, engine.speculative.method) == ("some/model", "ngram")
    assert (server.port, list(server.api_keys)) == (9000, ["a", "b"])


def test_a_bad_server_option_never_starts_anything(sonar: Sonar):
    assert sonar("serve", "some/model", "--port", "99999") == 1
    assert_one_line_error(sonar, "--port")
