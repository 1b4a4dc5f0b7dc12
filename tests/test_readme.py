"""Every command and example of the README is one that this version understands."""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from sonar_engine.cli.app import build_app
from sonar_engine.config_loader import load_config
from typer.main import get_command

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def shell_commands() -> list[list[str]]:
    """Words of each command in the bash blocks; a quoted text may span lines."""
    commands = []
    for block in blocks("bash"):
        pending = ""
        for line in block.splitlines():
            pending += line + "\n"
            try:
                words = shlex.split(pending, comments=True)
            except ValueError:
                continue
            pending = ""
            if words:
                commands.append(words)
        assert not pending, f"unclosed quote in {pending}"
    return commands


def commands_of(program: str) -> list[list[str]]:
    found = [words for words in shell_commands() if words[0] == program]
    assert found, f"the README shows no {program} command"
    return found


def parse_sonar(words: list[str]) -> dict[str, Any]:
    """The parameters of one `sonar` command line; a wrong option raises."""
    command: Any = get_command(build_app())
    context = None
    while hasattr(command, "commands") and words and words[0] in command.commands:
        command, words = command.commands[words[0]], words[1:]
    context = command.make_context("sonar", list(words))
    return dict(context.params)


def test_every_program_shown_is_one_that_the_tests_look_at():
    assert {words[0] for words in shell_commands()} <= {"make", "sonar", "curl", "python", "source"}


def test_every_make_target_exists():
    makefile = (ROOT / "Makefile").read_text()
    for _, target in commands_of("make"):
        assert re.search(rf"^{target}:.*## ", makefile, re.MULTILINE), target


def test_every_sonar_command_parses():
    for words in commands_of("sonar"):
        parse_sonar(words[1:])


def test_a_sonar_command_with_a_wrong_option_would_be_noticed():
    with pytest.raises(Exception, match="no-such-option"):
        parse_sonar(["serve", "smollm2-135m", "--no-such-option"])


def test_every_script_exists_and_takes_the_options_shown():
    for _, script, *options in commands_of("python"):
        source = (ROOT / script).read_text()
        for option in options:
            assert not option.startswith("--") or f'"{option}"' in source, option


def test_every_file_and_link_named_exists():
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target


def test_the_curl_example_sends_json_to_a_route_of_the_server():
    for words in commands_of("curl"):
        body = json.loads(words[words.index("-d") + 1])
        assert body["model"] == "smollm2-135m"
        assert words[1].startswith("http://127.0.0.1:8000/v1/")


def test_the_python_examples_compile():
    assert len(blocks("python")) >= 2
    for block in blocks("python"):
        ast.parse(block)


def test_the_library_example_runs(tiny_folder: Path, capsys: pytest.CaptureFixture[str]):
    (block,) = [block for block in blocks("python") if "build_engine" in block]
    exec(block.replace("smollm2-135m", str(tiny_folder)), {})
    assert capsys.readouterr().out


def test_the_yaml_example_is_a_valid_configuration(tmp_path: Path):
    (block,) = blocks("yaml")
    file = tmp_path / "sonar.yaml"
    file.write_text(block)
    loaded = load_config({}, {}, file)
    assert loaded.engine.max_num_seqs == yaml.safe_load(block)["max_num_seqs"]


def test_every_option_named_in_the_text_exists():
    helps = parse_help()
    for option in re.findall(r"`(--[a-z-]+)", README):
        assert option in helps, option


def parse_help() -> set[str]:
    """Every option of every command."""
    found = set()
    pending: list[Any] = [get_command(build_app())]
    while pending:
        command = pending.pop()
        pending += getattr(command, "commands", {}).values()
        for parameter in command.params:
            found |= {*parameter.opts, *parameter.secondary_opts}
    return found


def test_the_prompt_file_has_60_prompts_of_both_kinds():
    entries = [json.loads(line) for line in (ROOT / "bench/prompts.jsonl").read_text().splitlines()]
    assert len(entries) == 60
    assert {key for entry in entries for key in entry} == {"prompt", "messages"}
    assert len({json.dumps(entry) for entry in entries}) == 60


def test_no_placeholder_is_left():
    tracked = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in tracked.splitlines():
        assert not re.search(r"@[A-Z]+@|TODO|FIXME|XXX", (ROOT / name).read_text()), name
