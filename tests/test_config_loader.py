"""Configuration from command line, environment and file: precedence, and errors that name the culprit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sonar_engine.config import EngineConfig
from sonar_engine.config_loader import cache_folder, known_options, load_config
from sonar_engine.errors import ConfigError


def engine(cli: dict[str, Any] | None = None, environ: dict[str, str] | None = None, file: Path | None = None) -> Any:
    return load_config(cli or {}, environ or {}, file).engine


def yaml_file(folder: Path, text: str) -> Path:
    path = folder / "sonar.yaml"
    path.write_text(text)
    return path


def message(*args: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(*args)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_no_source_gives_the_defaults():
    assert engine() == EngineConfig()


def test_the_command_line_wins_over_the_environment_and_that_over_the_file(tmp_path: Path):
    file = yaml_file(tmp_path, "max_num_seqs: 3\nmax-waiting: 4\npage_size: 32\n")
    environ = {"SONAR_MAX_NUM_SEQS": "5", "SONAR_MAX_WAITING": "6"}
    config = engine({"max_num_seqs": "7"}, environ, file)
    assert (config.max_num_seqs, config.max_waiting, config.page_size) == (7, 6, 32)


def test_an_option_that_is_none_counts_as_absent(tmp_path: Path):
    file = yaml_file(tmp_path, "max_num_seqs: null\n")
    assert engine({"max_num_seqs": None}, {"SONAR_MAX_NUM_SEQS": "5"}, file).max_num_seqs == 5


def test_the_environment_can_name_the_file(tmp_path: Path):
    file = yaml_file(tmp_path, "page_size: 8\n")
    assert engine({}, {"SONAR_CONFIG": str(file)}).page_size == 8


def test_an_empty_file_changes_nothing(tmp_path: Path):
    assert engine(file=yaml_file(tmp_path, "# nothing yet\n")) == EngineConfig()


@pytest.mark.parametrize(("text", "value"), [("true", True), ("0", False), ("off", False)])
def test_flags_in_the_environment_are_words_or_digits(text: str, value: bool):
    assert engine({}, {"SONAR_ENABLE_PREFIX_CACHING": text}).enable_prefix_caching is value


def test_engine_and_server_options_share_one_file(tmp_path: Path):
    loaded = load_config({}, {}, yaml_file(tmp_path, "port: 9001\npage_size: 8\n"))
    assert (loaded.server.port, loaded.engine.page_size) == (9001, 8)


@pytest.mark.parametrize(("alias", "dtype"), [("fp32", "float32"), ("bf16", "bfloat16"), ("fp16", "float16")])
def test_short_names_of_dtypes_are_understood(alias: str, dtype: str):
    assert engine({"dtype": alias}).dtype == dtype


def test_several_api_keys_come_as_a_list_or_with_commas():
    from_cli = load_config({"api_key": ["a", "b"]}, {})
    from_environment = load_config({}, {"SONAR_API_KEY": "a, b"})
    assert list(from_cli.server.api_keys) == list(from_environment.server.api_keys) == ["a", "b"]


def test_every_option_has_one_name():
    names = known_options()
    assert len(set(names)) == len(names)
    assert {"model", "page_size", "speculative_config", "spec_method", "host", "port", "api_key"} <= set(names)


# Speculation


def test_speculation_is_one_json_object_or_its_shorthands():
    whole = engine({"speculative_config": '{"method": "ngram", "num_speculative_tokens": 3}'})
    parts = engine({"spec_method": "ngram", "num_speculative_tokens": "3"})
    assert whole.speculative == parts.speculative
    assert (whole.speculative.method, whole.speculative.num_speculative_tokens) == ("ngram", 3)


def test_speculation_in_a_file_is_a_mapping_that_a_shorthand_changes(tmp_path: Path):
    file = yaml_file(tmp_path, "speculative_config:\n  method: ngram\n  prompt_lookup_max: 3\n")
    speculative = engine({"num_speculative_tokens": "2"}, {}, file).speculative
    assert (speculative.method, speculative.prompt_lookup_max, speculative.num_speculative_tokens) == ("ngram", 3, 2)


def test_a_whole_speculative_config_replaces_that_of_a_weaker_source(tmp_path: Path):
    file = yaml_file(tmp_path, "speculative_config: {method: ngram, num_speculative_tokens: 7}\n")
    assert engine({"speculative_config": '{"method": "ngram"}'}, {}, file).speculative.num_speculative_tokens == 4


def test_the_whole_and_a_shorthand_from_one_source_contradict_each_other():
    text = message({"speculative_config": '{"method": "ngram"}', "spec_method": "ngram"}, {})
    assert "--spec-method and --speculative-config" in text


def test_a_number_of_drafts_without_a_method_is_refused():
    text = message({"num_speculative_tokens": "3"}, {})
    assert text == "--num-speculative-tokens: needs a method; add --spec-method ngram"


@pytest.mark.parametrize(
    ("value", "part"),
    [
        ("{method: ngram}", "not valid JSON"),
        ('"ngram"', "must be an object"),
        ('{"method": "ngramm"}', "--speculative-config: method"),
        ('{"method": "ngram", "num_draft": 3}', "--speculative-config: num_draft: no such field"),
        (
            '{"method": "ngram", "lossy": {"alpha": 3}}',
            "--speculative-config: lossy.alpha: no such field; known: posterior_threshold",
        ),
        (
            '{"method": "ngram", "lossy": {"posterior_alpha": 3}}',
            "--speculative-config: lossy.posterior_alpha: 3 is wrong",
        ),
        ('{"method": "ngram", "verification": "tree"}', "--speculative-config: verification"),
        ('{"method": "ngram", "num_speculative_token": 3}', "did you mean num_speculative_tokens?"),
        ('{"method": "ngram", "num_speculative_tokens": 0}', "greater than or equal to 1"),
        ('{"method": "ngram", "prompt_lookup_min": 5}', "prompt_lookup_min (5) is above prompt_lookup_max (4)"),
    ],
)
def test_a_wrong_speculative_config_is_explained(value: str, part: str):
    assert part in message({"speculative_config": value}, {})


# Errors


def test_an_unknown_option_names_its_source_and_the_nearest_one(tmp_path: Path):
    file = yaml_file(tmp_path, "max_num_seq: 3\n")
    assert message({}, {}, file) == f"max_num_seq ({file}): no such option; did you mean max_num_seqs ({file})?"
    text = message({}, {"SONAR_PAGESIZE": "3"})
    assert text.startswith("SONAR_PAGESIZE (environment): no such option; did you mean SONAR_PAGE_SIZE")


@pytest.mark.parametrize(
    ("cli", "environ", "start"),
    [
        ({"page_size": "abc"}, {}, '--page-size: "abc" is wrong: input should be a valid integer'),
        ({"page_size": "0"}, {}, '--page-size: "0" is wrong: input should be greater than or equal to 1'),
        (
            {},
            {"SONAR_DTYPE": "int3"},
            "SONAR_DTYPE (environment): \"int3\" is wrong: input should be 'auto', 'float32'",
        ),
        ({}, {"SONAR_PORT": "tcp://10.0.0.1:8000"}, 'SONAR_PORT (environment): "tcp://10.0.0.1:8000" is wrong'),
    ],
)
def test_a_bad_value_names_option_source_and_right_form(cli: dict[str, Any], environ: dict[str, str], start: str):
    assert message(cli, environ).startswith(start)


def test_several_bad_values_are_counted():
    assert message({"page_size": "0", "max_waiting": "0"}, {}).endswith("(and 1 more)")


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("a: [1", "not valid YAML"),
        ("- page_size", "must be a mapping"),
        ("1: 2", "must be a mapping"),
    ],
)
def test_a_damaged_file_is_one_line(tmp_path: Path, content: str, part: str):
    assert part in message({}, {}, yaml_file(tmp_path, content))


def test_a_missing_file_is_named(tmp_path: Path):
    assert "none.yaml: No such file" in message({}, {}, tmp_path / "none.yaml")


def test_a_secret_is_never_repeated_in_an_error(tmp_path: Path):
    file = yaml_file(tmp_path, "api_key: {secret: hunter2}\n")
    assert "hunter2" not in message({}, {}, file)


def test_variables_of_a_kubernetes_service_and_of_the_cache_are_no_options():
    environ = {"SONAR_SERVICE_HOST": "10.0.0.1", "SONAR_PORT_8000_TCP": "tcp://10.0.0.1:8000", "SONAR_CACHE": "/tmp"}
    assert engine({}, environ) == EngineConfig()


def test_the_cache_folder_comes_from_the_environment_or_the_home():
    assert cache_folder({"SONAR_CACHE": "/data/models"}) == Path("/data/models")
    assert cache_folder({}) == Path.home() / ".cache" / "sonar"


@pytest.mark.parametrize("text", ["1" * 5000, "[" * 20_000])
def test_json_that_python_cannot_hold_is_an_error_of_one_line(text):
    with pytest.raises(ConfigError, match="not valid JSON") as refused:
        load_config({"speculative_config": text}, {}, None)
    assert "\n" not in str(refused.value)


def test_an_infinite_size_is_refused():
    with pytest.raises(ConfigError, match="gib"):
        load_config({"kv_cache_gib": "inf"}, {}, None)


def test_no_more_than_four_threads_a_cpu_are_taken(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    assert engine({"num_threads": "12"}).num_threads == 12
    assert (
        message({"num_threads": "13"}, {}) == '--num-threads: "13" is wrong: must be 1 to 12; this machine has 3 CPUs'
    )
