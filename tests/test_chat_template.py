"""Chat templates in their sandbox: transformers' text, and a bad request for whatever a template does wrong."""

from __future__ import annotations

from typing import Any

import pytest
from sonar_engine import chat_template
from sonar_engine.chat_template import ChatTemplate
from sonar_engine.errors import InvalidRequestError
from tiny_models import CHAT, make_tokenizer


def render(source: str, chat: list[dict[str, Any]] | None = None, **variables: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(chat or CHAT, variables=variables)


TEMPLATES = [
    "{{ bos_token }}{% for m in messages %}\n    {% if m.role == 'user' %}\n{{ m.content }}{% endif %}\n{% endfor %}",
    "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ m['content'] }}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "{{ tools is none }}{{ messages[0].missing is defined }}{{ messages[-1].content.split('l')[-1] }}",
    "{%- macro turn(m) -%}[{{ m.role }}]{%- endmacro -%}{% for m in messages %}{{ turn(m) }}{% endfor %}",
    "{{ enable_thinking | default(true) }}{{ dict(a=1) | tojson }}",
]


@pytest.mark.parametrize("source", TEMPLATES)
def test_templates_render_as_transformers_renders_them(source: str) -> None:
    reference = make_tokenizer()
    reference.add_special_tokens({"bos_token": "<s>"})
    for prompt in (True, False):
        expected = reference.apply_chat_template(
            CHAT, chat_template=source, tokenize=False, add_generation_prompt=prompt
        )
        ours = ChatTemplate(source, {"bos_token": "<s>"}).render(CHAT, add_generation_prompt=prompt)
        assert ours == expected


CONTINUED = [
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}",
    "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</>{% endfor %}",
    "{% for m in messages %}<{{ m.role }}>{% for p in m.content %}{{ p.text or p }}{% endfor %}</>{% endfor %}",
]


PARTS = [{"type": "text", "text": "Hello "}]


@pytest.mark.parametrize(
    ("source", "content"),
    [
        *((source, text) for source in CONTINUED for text in ("Hello ", "Hello")),
        (CONTINUED[0], PARTS),
        (CONTINUED[2], PARTS),
    ],
)
def test_a_final_message_is_continued_as_transformers_continues_it(source: str, content: Any) -> None:
    messages = [*CHAT[:-1], {"role": "assistant", "content": content}]
    expected = make_tokenizer().apply_chat_template(
        messages, chat_template=source, tokenize=False, continue_final_message=True
    )
    template = ChatTemplate(source, {})
    assert template.render(messages, add_generation_prompt=False, continue_final_message=True) == expected


def test_a_final_message_that_cannot_be_continued_is_refused() -> None:
    template = ChatTemplate("{{ messages[0].content }}", {})
    with pytest.raises(InvalidRequestError, match="leaves out the final message"):
        template.render(CHAT, add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(InvalidRequestError, match="exclude each other"):
        template.render(CHAT, add_generation_prompt=True, continue_final_message=True)
    with pytest.raises(InvalidRequestError, match="needs text"):
        template.render(
            [{"role": "assistant", "content": None}], add_generation_prompt=False, continue_final_message=True
        )


def test_template_variables_reach_the_template_and_cannot_replace_the_messages() -> None:
    assert render("{{ thinking }}", thinking=False) == "False"
    assert render("{{ messages[1].content }}", messages=["x"], _render_deadline=0) == "Hi!"


def test_null_fields_of_a_message_are_absent() -> None:
    messages = [{"role": "assistant", "content": None, "tool_calls": None, "reasoning": "why"}]
    assert render("{{ messages[0] | tojson }}", messages) == (
        '{"role": "assistant", "reasoning": "why", "reasoning_content": "why"}'
    )


def test_a_refusal_of_the_template_is_a_bad_request_with_its_words() -> None:
    with pytest.raises(InvalidRequestError, match="roles must alternate") as caught:
        render("{{ raise_exception('roles must alternate') }}")
    assert caught.value.param == "messages"
    with pytest.raises(InvalidRequestError, match="at least one message"):
        ChatTemplate("x", {}).render([])
    with pytest.raises(InvalidRequestError, match="must be an object"):
        ChatTemplate("x", {}).render(["hi"])  # type: ignore[list-item]


HOSTILE = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ raise_exception.__globals__.items() }}",
    "{{ (messages | attr('append')) }}{{ messages.append(1) }}",
    "{% set messages[0].role = 'x' %}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{{ 'x' * 10**10 }}",
    "{{ 9 ** 99999999 }}",
    "{{ '%1000000000d' % 1 }}",
    "{% for i in range(10**9) %}x{% endfor %}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{{ 1 / 0 }}",
    "{% if %}",
    "{{ messages.nothing.at_all }}",
]


@pytest.mark.parametrize("source", HOSTILE)
def test_a_hostile_or_broken_template_is_a_bad_request_and_nothing_else(source: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        render(source)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{{ i + j }}{% endfor %}{% endfor %}",
        "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    ],
)
def test_a_template_that_would_run_or_grow_without_end_is_stopped(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 0.3)
    with pytest.raises(InvalidRequestError):
        render(source)


def test_a_template_of_absurd_size_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="exceeds"):
        render("x" * (chat_template.MAX_TEMPLATE_CHARACTERS + 1))
