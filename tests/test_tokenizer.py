"""Tokenizers of folders and GGUF files, and which chat template each of them takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sonar_engine.errors import InvalidRequestError, ModelLoadError
from sonar_engine.models.registry import ResolvedModel, resolve_model
from sonar_engine.tokenizer import Tokenizer, load_tokenizer
from tiny_gguf import tokenizer_gguf
from tiny_models import CHAT, make_tiny, make_tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

TEXTS = [
    "Hello  world\n\n 123 don't",
    "naïve 🦜 日本語 text",
    "  lead and trail  ",
    "x<|im_end|>y",
    "",
    "tab\tand\r\nlines\n",
]


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return load_tokenizer(resolve_model("smollm2-135m"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("smollm", tmp_path_factory.mktemp("tiny"), tokenizer=True)


@pytest.fixture
def tiny(folder: Path) -> Tokenizer:
    return load_tokenizer(ResolvedModel(folder, "hf", "tiny"))


def folder_with(path: Path, **config: Any) -> ResolvedModel:
    """A tokenizer folder whose tokenizer_config.json has these changes; a value of `...` removes a key."""
    make_tokenizer().save_pretrained(path)
    (path / "chat_template.jinja").unlink(missing_ok=True)
    file = path / "tokenizer_config.json"
    raw = {**json.loads(file.read_text()), **config}
    file.write_text(json.dumps({key: value for key, value in raw.items() if value is not ...}))
    return ResolvedModel(path, "hf", "tiny")


# --- the default model's


def test_the_default_tokenizer_has_the_vocabulary_of_its_file(smollm2: Tokenizer) -> None:
    from sonar_engine.models.gguf_file import GgufFile

    with GgufFile(resolve_model("smollm2-135m").path) as file:
        tokens = file.metadata["tokenizer.ggml.tokens"]
    assert smollm2.vocab_size == len(tokens) == 49152
    assert smollm2.convert_ids_to_tokens(range(len(tokens))) == tokens
    assert smollm2.special_ids == frozenset(range(17))


def test_the_default_tokenizer_ends_a_turn_at_im_end(smollm2: Tokenizer) -> None:
    assert smollm2.raw.token_to_id("<|im_end|>") in smollm2.eos_token_ids
    assert smollm2.encode("<|im_start|>user") == [1, *smollm2.encode("user")]


@settings(max_examples=100, deadline=None)
@given(text=st.text(st.characters(max_codepoint=0x3FFFF, exclude_categories=("Cs", "Cc"))))
def test_every_text_comes_back_from_its_tokens(smollm2: Tokenizer, text: str) -> None:
    ids = smollm2.encode(text)
    assert smollm2.decode(ids, skip_special_tokens=False) == text
    assert b"".join(smollm2.token_bytes(i) for i in ids) == text.encode()


def test_digits_are_single_tokens_and_known_texts_have_known_ids(smollm2: Tokenizer) -> None:
    # 0..9 are ids 32..41; spaces before a digit join the run of blanks before them.
    assert smollm2.encode("2026") == [34, 32, 34, 38]
    assert smollm2.convert_ids_to_tokens(smollm2.encode("Hello world")) == ["Hello", "Ġworld"]


def test_the_default_chat_template_writes_the_models_turns(smollm2: Tokenizer) -> None:
    text = smollm2.render_chat([{"role": "user", "content": "Hi!"}])
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi!<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = smollm2.apply_chat_template([{"role": "user", "content": "Hi!"}])
    assert smollm2.decode(ids, skip_special_tokens=False) == text
    assert ids.count(1) == 3
    assert ids.count(2) == 2


def test_starting_the_default_tokenizer_imports_neither_torch_nor_transformers() -> None:
    import subprocess
    import sys

    code = (
        "import sys\nfrom sonar_engine.models.registry import resolve_model\n"
        "from sonar_engine.tokenizer import load_tokenizer\n"
        "load_tokenizer(resolve_model('smollm2-135m')).apply_chat_template([{'role': 'user', 'content': 'x'}])\n"
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --- folders


def test_a_folders_tokenizer_does_what_transformers_does(folder: Path, tiny: Tokenizer) -> None:
    reference = AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        assert tiny.encode(text) == reference.encode(text)
        for skip in (True, False):
            assert tiny.decode(tiny.encode(text), skip) == reference.decode(
                reference.encode(text), skip_special_tokens=skip
            )
    for prompt in (True, False):
        expected = reference.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=prompt)
        assert tiny.render_chat(CHAT, add_generation_prompt=prompt) == expected
    assert tiny.eos_token_ids == (2,)
    assert tiny.bos_token_id == 0
    assert tiny.vocab_size == len(reference)
    assert tiny.special_ids == {0, 1, 2}


def test_what_tokenizer_json_puts_before_a_text_is_obeyed_and_no_flag_beside_it(tmp_path: Path) -> None:
    resolved = folder_with(tmp_path, add_bos_token=False)
    path = tmp_path / "tokenizer.json"
    raw = json.loads(path.read_text())
    bos = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
    raw["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [bos, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
    }
    path.write_text(json.dumps(raw))
    tokenizer = load_tokenizer(resolved)
    ids = tokenizer.encode("the cat")
    assert ids == [0, *tokenizer.encode("the cat", add_special_tokens=False)]
    assert ids == AutoTokenizer.from_pretrained(tmp_path).encode("the cat")


def test_stop_ids_are_those_of_all_three_files(tmp_path: Path) -> None:
    resolved = folder_with(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [0, 2]}')
    (tmp_path / "config.json").write_text('{"eos_token_id": 5}')
    assert load_tokenizer(resolved).eos_token_ids == (2, 0, 5)


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
@pytest.mark.parametrize("content", ['{"eos_token_id": "x"}', '{"eos_token_id": [2, true]}', "[]", "[" * 100_000])
def test_stop_ids_of_a_wrong_type_name_their_file(tmp_path: Path, file: str, content: str) -> None:
    resolved = folder_with(tmp_path)
    (tmp_path / file).write_text(content)
    with pytest.raises(ModelLoadError) as caught:
        load_tokenizer(resolved)
    assert str(caught.value).startswith(str(tmp_path / file))
    assert "\n" not in str(caught.value)


def test_named_templates_are_chosen_by_the_request(tmp_path: Path) -> None:
    templates = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{{ tools | length }} tools"},
    ]
    tokenizer = load_tokenizer(folder_with(tmp_path, chat_template=templates))
    assert tokenizer.render_chat(CHAT) == "plain"
    assert tokenizer.render_chat(CHAT, tools=[{"type": "function"}]) == "1 tools"


@pytest.mark.parametrize(
    "template",
    [5, True, {"name": "default", "template": "x"}, ["x"], [{"name": "default"}], [{"name": "default", "template": 5}]],
)
def test_a_chat_template_that_is_not_text_is_one_clear_error(tmp_path: Path, template: Any) -> None:
    with pytest.raises(
        ModelLoadError, match=r"tokenizer_config\.json: chat_template must be text, or a list"
    ) as caught:
        load_tokenizer(folder_with(tmp_path, chat_template=template))
    assert "\n" not in str(caught.value)


def test_a_vocabulary_without_tokenizer_json_is_converted(tmp_path: Path) -> None:
    raw = json.loads(make_tokenizer().backend_tokenizer.to_str())
    (tmp_path / "vocab.json").write_text(json.dumps(raw["model"]["vocab"]))
    lines = ["#version: 0.2", *(" ".join(pair) for pair in raw["model"]["merges"])]
    (tmp_path / "merges.txt").write_text("\n".join(lines))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
    tokenizer = load_tokenizer(ResolvedModel(tmp_path, "hf", "tiny"))
    assert tokenizer.encode("the cat") == make_tokenizer().encode("the cat")
    assert tokenizer.eos_token_ids == (0,)


def test_a_model_without_a_template_says_so_when_asked_to_chat(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(folder_with(tmp_path, chat_template=...))
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidRequestError, match="no chat template"):
        tokenizer.apply_chat_template(CHAT)


def test_a_missing_or_damaged_tokenizer_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"no tokenizer\.json"):
        load_tokenizer(ResolvedModel(tmp_path, "hf", "x"))
    resolved = folder_with(tmp_path)
    (tmp_path / "tokenizer.json").write_text((tmp_path / "tokenizer.json").read_text()[:-50])
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json is damaged"):
        load_tokenizer(resolved)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"tokenizer_config\.json"):
        load_tokenizer(resolved)


# --- input that is not text, ids that are not tokens


def test_lone_surrogates_and_impossible_ids_are_refused(tiny: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="surrogates"):
        tiny.encode("a\ud800b")
    for ids in ([-1], [2**40], ["x"]):
        with pytest.raises(InvalidRequestError, match="token ids"):
            tiny.decode(ids)
    assert tiny.decode([10**6]) == ""
    assert tiny.convert_ids_to_tokens([10**6, 2]) == [None, "<|im_end|>"]
    assert tiny.token_bytes(10**6) == b""


# --- tokenizers inside GGUF files


def byte_level_fields(**changes: Any) -> dict[str, Any]:
    """The tiny byte-level tokenizer as GGUF metadata."""
    raw = json.loads(make_tokenizer().backend_tokenizer.to_str())
    vocabulary = raw["model"]["vocab"]
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    fields = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [3 if token.startswith("<|") else 1 for token in tokens],
        "merges": [" ".join(pair) for pair in raw["model"]["merges"]],
        "bos_token_id": 0,
        "eos_token_id": 2,
        "tokenizer.chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}{{ eos_token }}",
    }
    return {key: value for key, value in {**fields, **changes}.items() if value is not None}


def from_fields(path: Path, fields: dict[str, Any]) -> Tokenizer:
    return load_tokenizer(ResolvedModel(tokenizer_gguf(path / "t.gguf", fields), "gguf", "t"))


def test_a_byte_level_gguf_tokenizer_equals_the_one_it_was_made_of(tmp_path: Path) -> None:
    tokenizer, original = from_fields(tmp_path, byte_level_fields()), make_tokenizer()
    for text in TEXTS:
        assert tokenizer.encode(text) == original.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == original.decode(
            original.encode(text), skip_special_tokens=True
        )
    assert tokenizer.eos_token_ids == (2, 0)
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.render_chat(CHAT) == "Be brief.Hi!Hello <|im_end|>"


def test_a_gguf_file_may_hold_a_template_for_tools(tmp_path: Path) -> None:
    tokenizer = from_fields(tmp_path, byte_level_fields(**{"tokenizer.chat_template.tool_use": "with tools"}))
    assert tokenizer.render_chat(CHAT, tools=[{"type": "function"}]) == "with tools"
    assert tokenizer.render_chat(CHAT).startswith("Be brief.")
    without = from_fields(tmp_path, byte_level_fields(**{"tokenizer.chat_template": None}))
    assert not without.has_chat_template


def qwen_reference(fields: dict[str, Any]) -> PreTrainedTokenizerFast:
    from transformers import Qwen2Tokenizer

    vocabulary = {token: index for index, token in enumerate(fields["tokens"])}
    return Qwen2Tokenizer(vocab=vocabulary, merges=[tuple(line.split(" ")) for line in fields["merges"]])


def test_the_qwen2_pre_tokenizer_splits_as_transformers_does(tmp_path: Path) -> None:
    fields = byte_level_fields(pre="qwen2")
    tokenizer, reference = from_fields(tmp_path, fields), qwen_reference(fields)
    for text in [*TEXTS, "e\u0301 CAN'T 12345 the  the", "a.b,c!!\n\n  the"]:
        assert tokenizer.encode(text.replace("<|im_end|>", "")) == reference.encode(text.replace("<|im_end|>", ""))


def test_llama3_keeps_up_to_three_digits_together_and_adds_its_bos(tmp_path: Path) -> None:
    tokenizer = from_fields(tmp_path, byte_level_fields(pre="llama-bpe"))
    assert tokenizer.encode("the")[0] == 0
    assert tokenizer.encode("the", add_special_tokens=False)[0] != 0
    pieces = [piece for piece, _ in tokenizer.raw.pre_tokenizer.pre_tokenize_str("in 12345 days")]
    assert pieces == ["in", "Ġ", "123", "45", "Ġdays"]
    assert from_fields(tmp_path, byte_level_fields(pre="llama-bpe", add_bos_token=False)).encode("the")[0] != 0


def sentencepiece_fields(**changes: Any) -> dict[str, Any]:
    """A SentencePiece-like vocabulary: control tokens, 256 bytes, characters, and words that score by rank."""
    words = ["he", "ll", "hell", "hello", "\u2581w", "or", "\u2581wor", "ld", "\u2581world", "\u2581hello", "\u2581t"]
    characters = ["\u2581", *"abcdefghijklmnopqrstuvwxyz"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *characters, *words]
    scores = [0.0] * 259 + [-1000.0] * len(characters) + [-float(rank) for rank in range(len(words))]
    types = [2, 3, 3] + [6] * 256 + [1] * (len(characters) + len(words))
    fields = {
        "model": "llama",
        "tokens": tokens,
        "scores": scores,
        "token_type": types,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    return {**fields, **changes}


def test_a_sentencepiece_gguf_tokenizer_merges_by_score_and_falls_back_to_bytes(tmp_path: Path) -> None:
    tokenizer = from_fields(tmp_path, sentencepiece_fields())
    ids = tokenizer.encode("hello world é")
    assert tokenizer.convert_ids_to_tokens(ids) == [
        "<s>", "\u2581hello", "\u2581world", "\u2581", "<0xC3>", "<0xA9>",
    ]  # fmt: skip
    assert tokenizer.decode(ids) == "hello world é"
    assert b"".join(tokenizer.token_bytes(i) for i in ids[1:]) == " hello world é".encode()
    assert tokenizer.eos_token_ids == (2,)
    plain = from_fields(tmp_path, sentencepiece_fields(add_space_prefix=False, add_bos_token=False))
    assert plain.convert_ids_to_tokens(plain.encode("hello")) == ["hello"]
    assert plain.decode(plain.encode(" hello")) == " hello"


def test_a_sentencepiece_gguf_tokenizer_equals_transformers(tmp_path: Path) -> None:
    from transformers import LlamaTokenizer
    from transformers.convert_slow_tokenizer import generate_merges

    fields = sentencepiece_fields()
    vocabulary = {token: index for index, token in enumerate(fields["tokens"])}
    scores = dict(zip(fields["tokens"], fields["scores"], strict=True))
    reference = LlamaTokenizer(vocab=vocabulary, merges=generate_merges(vocabulary, scores))
    tokenizer = from_fields(tmp_path, fields)
    for text in ["hello world", "hellohello  world", "the wor ld", "ünïcode 🦜", " hell", "", "low held"]:
        assert tokenizer.encode(text, add_special_tokens=False) == reference.encode(text, add_special_tokens=False)


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"model": "gpt2"}, "no vocabulary"),
        (byte_level_fields(pre="tekken"), "'tekken' is not supported"),
        (byte_level_fields(model="bert"), "'bert' is not supported"),
        (byte_level_fields(tokens=["a", "a"], token_type=[1, 1]), "appear twice"),
        (byte_level_fields(merges=["ab"]), "'ab' is not two tokens"),
        (byte_level_fields(merges=["zz yy"]), "do not fit together"),
        (sentencepiece_fields(scores=[1.0]), "one score a token"),
        (byte_level_fields(eos_token_id=10**6), "tokenizer.ggml.eos_token_id must be a token id from 0 to"),
        (byte_level_fields(eot_token_id="<|im_end|>"), "tokenizer.ggml.eot_token_id must be a token id"),
        (byte_level_fields(**{"tokenizer.chat_template": 5}), "tokenizer.chat_template must be text"),
    ],
)
def test_a_damaged_gguf_vocabulary_is_one_clear_error(tmp_path: Path, fields: dict[str, Any], part: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        from_fields(tmp_path, fields)
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)
