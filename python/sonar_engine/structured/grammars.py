"""From the form that a request asks for to a matcher of its tokens, in bounded time and memory."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from sonar_engine.errors import InvalidRequestError
from sonar_engine.structured.vocabulary import grammar_tokenizer
from sonar_engine.tokenizer import Tokenizer
from sonar_engine.types import StructuredOutput

MAX_CACHED = 64  # forms
MAX_ERROR_CHARS = 300
# A little space, or a new line and its indent: a model that likes space better than an end cannot go on with it.
JSON_SPACE = r" {0,2}|\n {0,24}"
# llguidance's fuel is time: about 50,000 units a millisecond at first, 14,000 in a step.
LIMITS = LLParserLimits(initial_lexer_fuel=1_000_000, max_lexer_states=20_000, verbose_errors=False)


class GrammarCompiler:
    """Compiles forms and keeps the last ones. Thread-safe; may be slow, so the engine's loop calls it beforehand."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """`vocab_size` is the width of the logits."""
        self.vocab_size = vocab_size
        self._make_tokenizer: Callable[[], LLTokenizer] = lambda: grammar_tokenizer(
            tokenizer, vocab_size, eos_token_ids
        )
        self._can_end = bool(eos_token_ids)
        self._tokenizer: LLTokenizer | None = None
        self._matchers: OrderedDict[StructuredOutput, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, form: StructuredOutput) -> LLMatcher:
        """The matcher at its start: take a `deep_copy`. Raises InvalidRequestError saying what is wrong."""
        with self._lock:
            matcher = self._matchers.get(form)
            if matcher is None:
                matcher = self._compile(form)
            self._matchers[form] = matcher
            self._matchers.move_to_end(form)
            while len(self._matchers) > MAX_CACHED:
                self._matchers.popitem(last=False)
            return matcher

    def _compile(self, form: StructuredOutput) -> LLMatcher:
        if not self._can_end:
            raise InvalidRequestError(
                "this model has no end-of-text token, which structured output needs", "structured"
            )
        grammar = _grammar(form)
        if self._tokenizer is None:
            self._tokenizer = self._make_tokenizer()
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise _invalid(form, matcher.get_error())
        matcher.compute_bitmask()  # a form that nothing fulfils, or whose first step is too much, shows here
        if matcher.is_error():
            raise _invalid(form, matcher.get_error())
        return matcher


def _grammar(form: StructuredOutput) -> str:
    try:
        match form.kind:
            case "json_schema":
                return _json_grammar(json.loads(form.content))
            case "json_object":
                return _json_grammar({"type": "object"})
            case "regex":
                return LLMatcher.grammar_from_regex(form.content)
            case "choice":
                return LLMatcher.grammar_from_regex(_choices(json.loads(form.content)))
            case "grammar":
                return LLMatcher.grammar_from_lark(any_to_lark(form.content))
    except (ValueError, RecursionError) as error:
        raise _invalid(form, str(error)) from None


def _json_grammar(schema: Any) -> str:
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    if not isinstance(schema, dict):
        raise ValueError(f"a JSON schema is an object or a boolean, not {type(schema).__name__}")
    return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": JSON_SPACE})


def _choices(texts: Any) -> str:
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise ValueError("give a list of at least one text, none of them empty")
    return "|".join("".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):X}}}" for c in text) for text in texts)


def _invalid(form: StructuredOutput, reason: str) -> InvalidRequestError:
    reason = reason.replace("<non-verbose/>", "").strip()
    if len(reason) > MAX_ERROR_CHARS:
        reason = reason[:MAX_ERROR_CHARS] + " ..."
    kind = {"json_schema": "JSON schema", "json_object": "JSON object", "regex": "regular expression"}.get(form.kind)
    return InvalidRequestError(f"the {kind or form.kind} cannot be used: {reason}", "structured")
