"""Prompts from a JSON Lines file."""

from __future__ import annotations

from pathlib import Path

import pytest
from sonar_engine.cli.prompts_file import read_prompts
from sonar_engine.errors import InvalidRequestError


def test_a_prompts_file_may_hold_line_separators_and_a_byte_order_mark(tmp_path: Path):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes('\ufeff{"prompt": "a\u2028b"}\n{"prompt": "c\u0085d"}\r\n'.encode())
    assert read_prompts(path) == ["a\u2028b", "c\u0085d"]


@pytest.mark.parametrize(
    "line",
    [
        '{"messages": [{"role": "user"}]}',
        '{"messages": [{"content": "x"}]}',
        '{"messages": [{"role": "user", "content": 5}]}',
        '{"prompt": ' + "1" * 5000 + "}",
        "[" * 100_000,
    ],
)
def test_an_unusable_line_of_a_prompts_file_is_named(tmp_path: Path, line: str):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line)
    with pytest.raises(InvalidRequestError, match=r"prompts\.jsonl:2: "):
        read_prompts(path)
