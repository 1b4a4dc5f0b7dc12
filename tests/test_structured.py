"""Structured output: every text has the form that was asked for, and is the text without drafts."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from conftest import BuildEngine
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llguidance import LLParserLimits
from sonar_engine.config import EngineConfig
from sonar_engine.engine import build_engine
from sonar_engine.errors import InvalidRequestError
from sonar_engine.structured import grammars
from sonar_engine.structured.grammars import MAX_CACHED, GrammarCompiler
from sonar_engine.tokenizer import Tokenizer
from sonar_engine.types import Completion, SamplingParams, StructuredOutput
from test_engine import NGRAM
from test_oracle import TIGHT, oracle, write_texts
from tiny_heads import make_head
from tiny_models import make_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["cat", "dog", "the hat"]}, "maxItems": 3},
        "spouse": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/spouse"}]},
    },
    "required": ["name", "age", "tags", "spouse"],
    "additionalProperties": False,
    "$defs": {
        "spouse": {
            "type": "object",
            "properties": {"since": {"type": "string", "pattern": "^[0-9]{4}$"}},
            "required": ["since"],
            "additionalProperties": False,
        }
    },
}
REGEX = r"(cat|dog){1,4} on the (mat|hat)[.!]"
CHOICES = ["the cat", "the cat sat", "the dog", 'a "quoted\\" one', "naïve €"]
LARK = 'start: item ("," item){0,5}\nitem: /[a-c]{1,3}/ | "(" start ")"\n'
GBNF = 'root ::= "the " animal (" and " animal)?\nanimal ::= "cat" | "dog"\n'


def form(kind: str, content: Any = "") -> StructuredOutput:
    return StructuredOutput(kind=kind, content=content if isinstance(content, str) else json.dumps(content))


FORMS = {
    "json_schema": form("json_schema", SCHEMA),
    "regex": form("regex", REGEX),
    "choice": form("choice", CHOICES),
    "lark": form("grammar", LARK),
    "gbnf": form("grammar", GBNF),
    "none": None,
}
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0, "seed": 5},
    "hot": {"temperature": 3.0, "seed": 6, "min_p": 0.001},
    "penalised": {"temperature": 0.7, "seed": 7, "frequency_penalty": 1.0, "repetition_penalty": 1.3, "top_p": 0.9},
    "with others": {"temperature": 1.0, "seed": 8, "min_tokens": 12, "banned_token_ids": [3, 4, 5], "logprobs": 3},
}
PROMPTS = [[5, 9, 100 + i, 30, 60] for i in range(len(FORMS) * len(SAMPLING))]
PARAMS = [
    SamplingParams(max_tokens=200, structured=asked, **sampling)
    for asked in FORMS.values()
    for sampling in SAMPLING.values()
]
DRAFTERS = ("ngram", "mtp", "draft_model", "oracle 0", "oracle 0.5", "oracle 1")


def check(asked: StructuredOutput | None, text: str) -> None:
    match asked:
        case StructuredOutput(kind="json_schema"):
            jsonschema.validate(json.loads(text), json.loads(asked.content))
        case StructuredOutput(kind="regex"):
            assert re.fullmatch(asked.content, text)
        case StructuredOutput(kind="choice"):
            assert text in CHOICES
        case StructuredOutput(content=content) if content == LARK:
            assert set(text) <= set("abc,()")
            assert text.count("(") == text.count(")")
        case StructuredOutput(content=content) if content == GBNF:
            assert re.fullmatch("the (cat|dog)( and (cat|dog))?", text)


def speculative(drafter: str, target: Path, plain: list[Completion], folder: Path) -> dict[str, Any]:
    if drafter == "mtp":
        head = make_head(target, folder / "head")
        return {"method": "mtp", "model": str(head), "num_speculative_tokens": 3, "prompt_lookup": True}
    if drafter == "draft_model":
        return {"method": "draft_model", "model": str(target), "num_speculative_tokens": 3}
    if drafter.startswith("oracle"):
        return oracle(write_texts(folder / "texts", plain), [float(drafter.split()[1])])
    return NGRAM


def outcome(completions: Sequence[Completion]) -> list[tuple[Any, ...]]:
    return [(c.token_ids, c.text, c.finish_reason, c.stop_reason, c.logprobs) for c in completions]


@pytest.fixture(scope="module")
def plain(tiny_folder: Path) -> list[Completion]:
    options: dict[str, Any] = {"batch_invariant": True, "num_threads": 1, "max_model_len": 256, "kv_cache_tokens": 4096}
    engine = build_engine(
        EngineConfig(model=str(tiny_folder), dtype="float32", max_num_seqs=16, page_size=4, **options)
    )
    completions = engine.generate(PROMPTS, PARAMS)
    engine.close()
    return completions


def test_every_text_that_ends_by_itself_has_its_form(plain: list[Completion]) -> None:
    ended = 0
    for params, completion in zip(PARAMS, plain, strict=True):
        if completion.finish_reason == "stop":
            check(params.structured, completion.text)
            ended += params.structured is not None
    assert ended > 0.8 * (len(PARAMS) - len(SAMPLING))


@pytest.mark.parametrize("options", [{}, TIGHT], ids=["calm", "tight"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_drafts_change_no_text(
    drafter: str, options: dict[str, Any], build_tiny: BuildEngine, plain: list[Completion], tmp_path: Path
) -> None:
    target = Path(build_tiny().config.model)
    engine = build_tiny(speculative=speculative(drafter, target, plain, tmp_path), **options)
    for _ in range(2):  # with a cold and a warm prefix cache
        completions = engine.generate(PROMPTS, PARAMS)
        assert outcome(completions) == outcome(plain)
    stats = engine.stats()
    assert (stats.num_preemptions > 0) == bool(options)
    assert stats.num_draft_tokens > 0
    assert (stats.num_accepted_tokens > 0) == (drafter != "oracle 0")


def test_unseeded_samples_follow_the_law_of_the_masked_target(build_tiny: BuildEngine, tiny_folder: Path) -> None:
    """Sampled drafts are verified against the probabilities that the grammar leaves."""
    choices = ["cat", "dog", "the", "hat", "sun"]
    params = SamplingParams(temperature=1.0, max_tokens=8, structured=form("choice", choices))
    counts = []
    for speculative in ({}, {"method": "draft_model", "model": str(tiny_folder), "num_speculative_tokens": 3}):
        engine = build_tiny(seed=len(counts), **({"speculative": speculative} if speculative else {}))
        texts = [c.text for c in engine.generate([[5, 9, 100, 30, 60]] * 1500, params)]
        assert set(texts) <= set(choices)
        counts.append([texts.count(choice) for choice in choices])
    total = sum((a - b) ** 2 / (a + b) for a, b in zip(*counts, strict=True) if a + b)
    assert total < 18.5  # chi-square, 4 degrees of freedom, p = 0.001


def test_what_else_forbids_gives_way_where_the_grammar_leaves_nothing_more(build_tiny: BuildEngine) -> None:
    asked = form("choice", ["cat"])
    tokenizer = build_tiny().tokenizer
    banned = [i for i in range(320) if tokenizer.token_bytes(i).startswith(b"c")]
    for fields in ({"min_tokens": 20}, {"banned_token_ids": banned}, {"allowed_token_ids": [7]}):
        params = SamplingParams(temperature=1.0, max_tokens=30, structured=asked, **fields)
        (completion,) = build_tiny(speculative=NGRAM).generate([[5, 9]], params)
        assert (completion.text, completion.finish_reason) == ("cat", "stop")


def test_stops_and_limits_end_a_text_before_its_form_is_complete(build_tiny: BuildEngine) -> None:
    engine = build_tiny(speculative=NGRAM)
    asked = form("json_schema", SCHEMA)
    runs = [{"max_tokens": 3}, {"max_tokens": 200, "stop": ['"age"']}]
    params = [SamplingParams(temperature=1.0, seed=1, structured=asked, **run) for run in runs]
    cut, stopped = engine.generate([[5, 9]] * 2, params)
    assert (cut.finish_reason, len(cut.token_ids)) == ("length", 3)
    assert stopped.finish_reason == "stop"
    assert '"age"' not in stopped.text


WRONG = {
    "an unclosed group": form("regex", "(a"),
    "look-ahead": form("regex", "a(?=b)"),
    "no grammar": form("grammar", "start: nothing"),
    "no JSON": form("json_schema", "{"),
    "a schema that is a list": form("json_schema", [1]),
    "an unknown type": form("json_schema", {"type": "strin"}),
    "a keyword that cannot be followed": form("json_schema", {"not": {"type": "string"}}),
    "a schema elsewhere": form("json_schema", {"$ref": "http://example.com/schema"}),
    "a schema that nothing fulfils": form("json_schema", {"type": "integer", "minimum": 5, "maximum": 3}),
    "the schema false": form("json_schema", False),
    "no choice": form("choice", []),
    "an empty choice": form("choice", [""]),
    "a schema 30,000 deep": form("json_schema", '{"properties":{"a":' * 30_000 + "{}" + "}}" * 30_000),
    "a huge regular expression": form("regex", "(" * 10_000 + "a" + ")" * 10_000),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_form_that_cannot_be_used_is_refused_in_words(name: str, build_tiny: BuildEngine) -> None:
    engine = build_tiny()
    began = time.monotonic()
    with pytest.raises(InvalidRequestError) as caught:
        engine.generate([[5]], SamplingParams(structured=WRONG[name]))
    assert time.monotonic() - began < 5
    assert caught.value.param == "structured"
    assert len(str(caught.value)) < 500
    check(FORMS["regex"], engine.generate([[5]], PARAMS[len(SAMPLING)])[0].text)


GREEDY_FORMS = {
    "nested repeats": form("regex", "(a+)+b"),
    "repeats of repeats": form("regex", "(((a{1,100}){1,100}){1,100}){1,100}"),
    "many states": form("regex", "(.*a.{50}b.*|.*c.{60}.*){1,30}"),
    "many choices": form("json_schema", {"enum": [f"x{i}" for i in range(5000)]}),
    "a long array": form("json_schema", {"type": "array", "items": {"type": "integer"}, "maxItems": 100_000}),
    "many alternatives": form("json_schema", {"anyOf": [{"required": [f"p{i}"]} for i in range(1000)]}),
}


@pytest.mark.parametrize("name", GREEDY_FORMS)
def test_a_form_that_is_too_much_work_fails_alone_and_soon(name: str, build_tiny: BuildEngine) -> None:
    """Compiled and followed in bounded time; where it has to be given up, its own request alone ends in an error."""
    engine = build_tiny(speculative=NGRAM)
    fine = SamplingParams(temperature=0.0, max_tokens=60, structured=FORMS["regex"])
    greedy = SamplingParams(temperature=1.0, seed=3, max_tokens=60, structured=GREEDY_FORMS[name])
    (alone,) = engine.generate([[5, 9]], fine)
    began = time.monotonic()
    try:
        together = engine.generate([[5, 9], [7, 11]], [fine, greedy])
    except InvalidRequestError:
        together = engine.generate([[5, 9]], [fine])
    assert time.monotonic() - began < 20
    assert together[0].token_ids == alone.token_ids
    assert all(c.finish_reason in ("stop", "length", "error") for c in together)


def test_a_grammar_that_gives_up_ends_its_request_with_an_error_and_frees_it(
    build_tiny: BuildEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "LIMITS", LLParserLimits(max_lexer_states=200, verbose_errors=False))
    engine = build_tiny(speculative=NGRAM)
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=100, structured=GREEDY_FORMS["many states"])
    reasons = {c.finish_reason for c in engine.generate([[7, 11 + i] for i in range(8)], params)}
    assert "error" in reasons
    assert engine.stats().num_running == 0


def test_the_cache_of_forms_is_bounded_and_a_form_that_left_it_is_made_anew(build_tiny: BuildEngine) -> None:
    engine = build_tiny()
    compiler = engine._compiler
    for i in range(3 * MAX_CACHED):
        engine.prepare(form("choice", [f"number {i}"]))
    assert len(compiler._matchers) == MAX_CACHED
    (completion,) = engine.generate([[5]], SamplingParams(max_tokens=30, structured=form("choice", ["number 0"])))
    assert completion.text == "number 0"


def test_structured_output_needs_a_model_that_can_end() -> None:
    tokenizer = Tokenizer(make_tokenizer().backend_tokenizer, special_tokens={})
    with pytest.raises(InvalidRequestError, match="end-of-text"):
        GrammarCompiler(tokenizer, 320, []).compile(form("regex", "a"))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8), min_size=1, max_size=5))
def test_any_texts_can_be_choices(choices: list[str]) -> None:
    raw = make_tokenizer().backend_tokenizer
    tokenizer = Tokenizer(raw, special_tokens={"eos_token": "<|im_end|>"})
    matcher = GrammarCompiler(tokenizer, 320, [2]).compile(form("choice", choices))
    for choice in choices:
        one = matcher.deep_copy()
        ids = tokenizer.encode(choice, add_special_tokens=False)
        if not set(ids) & tokenizer.special_ids:
            assert one.try_consume_tokens(ids) == len(ids)
            assert one.is_accepting()
