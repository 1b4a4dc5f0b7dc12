"""The guide to adding a drafter: its example works as written, and changes no token."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
from conftest import BuildEngine
from sonar_engine.drafters import registry
from sonar_engine.types import SamplingParams
from test_engine import ids, make_prompts

GUIDE = Path(__file__).parent.parent / "docs" / "drafters.md"
IMPORTS = """
from __future__ import annotations
from typing import Literal
import numpy as np
import torch
from sonar_engine.drafters.base import Draft, Verdict
from sonar_engine.drafters.registry import DrafterContext
from sonar_engine.step_buffers import BatchMetadata
"""


def test_the_guides_drafter_is_one_file_and_one_line(build_tiny: BuildEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"^ *```python\n(.*?)^ *```", GUIDE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    the_file, the_line = (textwrap.dedent(block) for block in blocks)
    module: dict[str, Any] = {"DrafterMethod": registry.DrafterMethod}
    exec(compile(IMPORTS + the_file, str(GUIDE), "exec"), module)
    entry = eval("{" + the_line + "}", module)
    # The name of an existing method, since the configuration knows no other.
    monkeypatch.setitem(registry.DRAFTERS, "ngram", entry["repeat"])
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logit_bias={7: 9.0})
    drafting = build_tiny(speculative={"method": "ngram", "num_speculative_tokens": 3})
    prompts = make_prompts(6)
    assert ids(drafting.generate(prompts, params)) == ids(build_tiny().generate(prompts, params))
    stats = drafting.stats()
    assert 0 < stats.num_accepted_tokens <= stats.num_draft_tokens
