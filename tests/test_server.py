"""Whole answers: shapes, fields, defaults, choices, log-probabilities, metrics, and the routes around them."""

from __future__ import annotations

import json

import pytest
from server_harness import CHAT, COMPLETIONS, HELLO, TOKENIZER, serving
from sonar_engine.server.config import ServerConfig
from sonar_engine.testing.fake_engine import FakeOptions

ECHO = FakeOptions(echo=True, tokens_per_step=4)


async def test_a_chat_answer_has_openais_shape():
    async with serving() as served:
        response = await served.post(CHAT, model="fake", messages=HELLO, max_tokens=5, temperature=0)
    answer = response.json()
    assert response.status_code == 200
    assert answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-")
    (choice,) = answer["choices"]
    assert choice["message"]["role"] == "assistant" and len(choice["message"]["content"]) == 5
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "length", None)
    prompt = len(TOKENIZER.apply_chat_template(HELLO))
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (prompt, 5, prompt + 5)


async def test_a_completion_answer_has_openais_shape():
    async with serving() as served:
        answer = (await served.post(COMPLETIONS, prompt="abc", max_tokens=4)).json()
    assert answer["object"] == "text_completion" and answer["id"].startswith("cmpl-")
    assert len(answer["choices"][0]["text"]) == 4
    assert answer["usage"]["prompt_tokens"] == 3


async def test_completions_default_to_16_tokens_and_chat_to_the_rest_of_the_context():
    async with serving(FakeOptions(tokens_per_step=8), max_model_len=100) as served:
        completion = (await served.post(COMPLETIONS, prompt="abc")).json()
        chat = (await served.post(CHAT, messages=HELLO)).json()
    assert completion["usage"]["completion_tokens"] == 16
    assert chat["usage"]["total_tokens"] == 100


async def test_prompts_may_be_text_token_ids_or_lists_of_either():
    async with serving(ECHO) as served:
        ids = TOKENIZER.encode("the cat")
        for prompt, expected in (
            ("the cat", ["the cat"]),
            (ids, ["the cat"]),
            (["a", "the cat"], ["a", "the cat"]),
            ([ids, TOKENIZER.encode("x")], ["the cat", "x"]),
        ):
            answer = (await served.post(COMPLETIONS, prompt=prompt)).json()
            assert [choice["text"] for choice in answer["choices"]] == expected
            assert [choice["index"] for choice in answer["choices"]] == list(range(len(expected)))


async def test_choices_of_every_prompt_are_grouped_and_seeded_by_seed_plus_index():
    async with serving() as served:
        body = {"max_tokens": 8, "temperature": 1.0}
        answer = (await served.post(COMPLETIONS, prompt=["a", "b"], n=3, seed=7, **body)).json()
        alone = [(await served.text("a", seed=7 + index, **body))["text"] for index in range(3)]
    texts = [choice["text"] for choice in answer["choices"]]
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert texts[:3] == alone and len(set(texts)) == 6
    assert answer["usage"]["prompt_tokens"] == 2 and answer["usage"]["completion_tokens"] == 48


async def test_the_largest_seed_wraps_for_later_choices():
    async with serving() as served:
        answer = (await served.post(COMPLETIONS, prompt="a", n=2, seed=2**63 - 1, max_tokens=4)).json()
        wrapped = await served.text("a", seed=-(2**63), max_tokens=4)
    assert answer["choices"][1]["text"] == wrapped["text"]


async def test_null_equals_absent():
    fields = ("n", "temperature", "top_p", "stop", "seed", "logit_bias", "tools", "response_format", "stream")
    async with serving() as served:
        plain = (await served.post(CHAT, messages=HELLO, max_tokens=4)).json()
        nulls = (await served.post(CHAT, messages=HELLO, max_tokens=4, **dict.fromkeys(fields))).json()
    assert plain["choices"] == nulls["choices"]


async def test_the_models_own_defaults_apply_to_absent_fields_only():
    async with serving(defaults={"temperature": 0.0, "top_p": 0.9}) as served:
        first = await served.text("a", seed=1)
        second = await served.text("a", seed=2)
        warm = await served.text("a", seed=2, temperature=1.0)
    assert first["text"] == second["text"] != warm["text"]


async def test_several_tokens_a_step_give_the_same_answer_as_one():
    answers = []
    for width in (1, 5):
        async with serving(FakeOptions(tokens_per_step=width)) as served:
            answers.append(await served.text("a", max_tokens=13, temperature=0, stop=["q"], logprobs=2))
    assert answers[0] == answers[1]


async def test_speculation_off_by_request_gives_the_same_text_without_drafts():
    async with serving(FakeOptions(tokens_per_step=4)) as served:
        on = (await served.post(COMPLETIONS, prompt="a", temperature=0, return_metrics=True)).json()
        off = (
            await served.post(
                COMPLETIONS, prompt="a", temperature=0, return_metrics=True, speculative={"enabled": False}
            )
        ).json()
    assert on["choices"] == off["choices"] and on["usage"] == off["usage"]
    assert on["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0
    assert off["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_counts_the_tokens_up_to_the_one_that_completed_it(stream):
    async with serving(ECHO) as served:
        body = {"prompt": "abcdefghijkl", "max_tokens": 50, "stop": ["fg"], "return_token_ids": True}
        if stream:
            events = await served.events(COMPLETIONS, **body, stream_options={"include_usage": True})
            text, finish, usage = events.text(), events.finish(), events.chunks[-1]["usage"]
            ids = [token for choice in events.of(0) for token in choice.get("token_ids", ())]
            reason = events.of(0)[-1]["stop_reason"]
        else:
            answer = (await served.post(COMPLETIONS, **body)).json()
            (choice,) = answer["choices"]
            text, finish, usage, ids = choice["text"], choice["finish_reason"], answer["usage"], choice["token_ids"]
            reason = choice["stop_reason"]
        assert (text, finish, reason) == ("abcde", "stop", "fg")
        assert usage["completion_tokens"] == 7 and len(ids) == 7
        await served.until_idle()


async def test_a_stop_string_may_stay_in_the_text():
    async with serving(ECHO) as served:
        choice = await served.text("abcdef", stop=["cd"], include_stop_str_in_output=True)
    assert choice["text"] == "abcd"


async def test_a_stop_token_is_reported_and_its_text_left_out():
    async with serving(ECHO) as served:
        token = TOKENIZER.encode("d")[0]
        choice = await served.text("abcdef", stop_token_ids=[token])
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("abc", "stop", token)


async def test_end_of_text_has_no_stop_reason_and_ignore_eos_goes_on():
    async with serving(ECHO) as served:
        ended = await served.text("abc", max_tokens=6)
        ignored = await served.text("abc", max_tokens=6, ignore_eos=True, skip_special_tokens=False)
    assert (ended["text"], ended["finish_reason"], ended["stop_reason"]) == ("abc", "stop", None)
    assert (ignored["text"], ignored["finish_reason"]) == ("abc" + "<|im_end|>" * 3, "length")


async def test_a_stop_inside_the_budget_wins_over_the_budget():
    async with serving(FakeOptions(echo=True, tokens_per_step=8)) as served:
        assert (await served.text("abcdef", max_tokens=5, stop=["e"]))["finish_reason"] == "stop"
        beyond = await served.text("abcdef", max_tokens=4, stop=["e"])
    assert (beyond["text"], beyond["finish_reason"]) == ("abcd", "length")


async def test_echo_puts_the_prompt_before_the_answer():
    async with serving() as served:
        plain = await served.text("the cat", max_tokens=4, temperature=0)
        echoed = await served.text("the cat", max_tokens=4, temperature=0, echo=True)
    assert echoed["text"] == "the cat" + plain["text"]


async def test_chat_logprobs_have_an_entry_a_token_with_its_bytes():
    async with serving(ECHO) as served:
        body = {"messages": [{"role": "user", "content": "é"}], "logprobs": True, "top_logprobs": 2}
        answer = (await served.post(CHAT, **body, skip_special_tokens=False)).json()
    content = answer["choices"][0]["logprobs"]["content"]
    assert len(content) == answer["usage"]["completion_tokens"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    assert content[0]["token"] == "<|im_start|>" and content[0]["logprob"] == -0.5
    halves = [entry["bytes"] for entry in content if entry["token"] == "\ufffd"]
    assert halves == [[0xC3], [0xA9]]


async def test_chat_logprobs_without_top_logprobs_are_empty_lists():
    async with serving() as served:
        answer = (await served.post(CHAT, messages=HELLO, logprobs=True, max_tokens=3)).json()
    assert [entry["top_logprobs"] for entry in answer["choices"][0]["logprobs"]["content"]] == [[], [], []]


async def test_completion_logprobs_are_parallel_lists_with_text_offsets():
    async with serving(ECHO) as served:
        logprobs = (await served.text("the é!", logprobs=1))["logprobs"]
    assert logprobs["tokens"] == ["the", " ", "bytes:\\xc3", "bytes:\\xa9", "!", "<|im_end|>"]
    assert logprobs["text_offset"] == [0, 3, 4, 5, 5, 6]
    assert logprobs["token_logprobs"] == [-0.5] * 6
    assert logprobs["top_logprobs"][0] == {"the": -0.5}


async def test_metrics_of_a_response_come_on_request_or_by_option():
    async with serving(FakeOptions(tokens_per_step=3)) as served:
        without = (await served.post(COMPLETIONS, prompt="a")).json()
        asked = (await served.post(COMPLETIONS, prompt="a", max_tokens=7, return_metrics=True)).json()
    async with serving(server=ServerConfig(per_request_metrics=True)) as served:
        always = (await served.post(COMPLETIONS, prompt="a")).json()
    assert "metrics" not in without and always["metrics"]["queue_time_ms"] >= 0
    speculation = asked["metrics"]["speculative_decoding"]
    assert speculation["num_spec_steps"] == 2 and speculation["acceptance_histogram"] == [0, 0, 2]
    assert speculation["mean_acceptance_length"] == 3.0 and speculation["draft_acceptance_rate"] == 1.0


async def test_sums_over_requests_equal_the_counters():
    async with serving(FakeOptions(tokens_per_step=3, drafts_per_step=4)) as served:
        answers = [
            (await served.post(COMPLETIONS, prompt="ab", n=2, max_tokens=tokens, return_metrics=True)).json()
            for tokens in (4, 7, 9)
        ]
        text = (await served.http.get("/metrics")).text
    counters = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    speculation = [answer["metrics"]["speculative_decoding"] for answer in answers]
    for name, field in (
        ("spec_decode_num_drafts_total", "num_spec_steps"),
        ("spec_decode_num_draft_tokens_total", "num_draft_tokens"),
        ("spec_decode_num_accepted_tokens_total", "num_accepted_draft_tokens"),
    ):
        assert float(counters[f"sonar_{name}"]) == sum(each[field] for each in speculation) > 0
    generated = sum(answer["usage"]["completion_tokens"] for answer in answers)
    assert float(counters["sonar_generation_tokens_total"]) == generated
    assert float(counters['sonar_request_success_total{finished_reason="length"}']) == 6
    assert float(counters["sonar_time_to_first_token_seconds_count"]) == 6
    assert float(counters["sonar_inter_token_latency_seconds_count"]) > 0


NAMES = """num_requests_running num_requests_waiting kv_cache_usage_perc num_preemptions_total
prefix_cache_queries_total prefix_cache_hits_total prompt_tokens_total generation_tokens_total request_success_total
time_to_first_token_seconds_bucket inter_token_latency_seconds_bucket request_time_per_output_token_seconds_bucket
e2e_request_latency_seconds_bucket request_queue_time_seconds_bucket request_prefill_time_seconds_bucket
request_decode_time_seconds_bucket iteration_tokens_total_bucket cache_config_info spec_decode_num_drafts_total
spec_decode_num_draft_tokens_total spec_decode_num_accepted_tokens_total spec_decode_draft_length
spec_decode_num_accepted_tokens_per_pos_total step_seconds_total device_idle_seconds_total"""


async def test_the_metrics_have_the_names_that_dashboards_know():
    async with serving(FakeOptions(tokens_per_step=2)) as served:
        await served.text("a")
        response = await served.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    seen = {line.partition("{")[0].split()[0] for line in response.text.splitlines() if not line.startswith("#")}
    assert {f"sonar_{name}" for name in NAMES.split()} <= seen


async def test_models_are_listed_under_the_served_name():
    async with serving(server=ServerConfig(served_model_name="tiny")) as served:
        listed = (await served.http.get("/v1/models")).json()
        one = await served.http.get("/v1/models/tiny")
        other = await served.http.get("/v1/models/fake")
        answer = (await served.post(COMPLETIONS, model="tiny", prompt="a")).json()
    assert [model["id"] for model in listed["data"]] == ["tiny"] == [one.json()["id"]]
    assert answer["model"] == "tiny"
    assert other.status_code == 404 and other.json()["error"]["code"] == "model_not_found"


async def test_tokenize_and_detokenize_are_inverse():
    async with serving() as served:
        plain = (await served.post("/tokenize", prompt="the 😀", return_token_strs=True)).json()
        chat = (await served.post("/tokenize", messages=HELLO)).json()
        back = (await served.post("/detokenize", tokens=plain["tokens"])).json()
    assert plain["count"] == len(plain["tokens"]) == len(plain["token_strs"]) and plain["max_model_len"] == 2048
    assert chat["tokens"] == TOKENIZER.apply_chat_template(HELLO)
    assert back == {"prompt": "the 😀"}


async def test_chat_messages_may_be_parts_and_come_back_from_an_answer():
    async with serving(ECHO) as served:
        answer = (await served.post(CHAT, messages=HELLO)).json()["choices"][0]["message"]
        parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
        messages = [
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": parts},
            {**answer, "annotations": [], "tool_calls": None},
            {"role": "user", "content": "go on", "name": "me"},
        ]
        fields = {"skip_special_tokens": False, "ignore_eos": True, "max_tokens": 200}
        echoed = (await served.post(CHAT, messages=messages, **fields)).json()
    text = echoed["choices"][0]["message"]["content"]
    assert "<|im_start|>system\nbe brief" in text and "<|im_start|>user\none\ntwo<|im_end|>" in text


async def test_the_final_message_can_be_continued():
    async with serving(ECHO) as served:
        messages = [*HELLO, {"role": "assistant", "content": "I think"}]
        fields = {"continue_final_message": True, "ignore_eos": True, "max_tokens": 100}
        answer = (await served.post(CHAT, messages=messages, **fields)).json()
        both = await served.post(CHAT, messages=messages, add_generation_prompt=True, **fields)
    assert answer["choices"][0]["message"]["content"].endswith("I think")
    assert both.status_code == 400


async def test_a_prompt_can_be_cut_to_its_last_tokens():
    async with serving(ECHO) as served:
        assert (await served.text("abcdef", truncate_prompt_tokens=3))["text"] == "def"
        long = await served.text("x" * 5000, truncate_prompt_tokens=-1, max_tokens=1)
    assert long["text"] == "x"


async def test_the_clients_own_id_comes_back_but_is_no_handle():
    async with serving(server=ServerConfig(admin_key="root")) as served:
        response = await served.post(COMPLETIONS, prompt="a", request_id="my-7")
        admin = {"Authorization": "Bearer root"}
        aborted = await served.http.post("/abort", json={"request_id": "my-7"}, headers=admin)
    assert response.headers["x-request-id"] == "my-7" and response.json()["id"] != "my-7"
    assert aborted.status_code == 404


async def test_single_token_bad_words_are_forbidden_and_longer_ones_refused():
    async with serving() as served:
        refused = await served.post(COMPLETIONS, prompt="a", bad_words=["a"])
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "bad_words"


async def test_version_load_and_health_answer():
    async with serving() as served:
        assert (await served.http.get("/version")).json()["version"]
        assert (await served.http.get("/load")).json() == {"server_load": 0, "num_open_sequences": 0}
        assert (await served.http.get("/health")).status_code == 200
        assert (await served.http.get("/ready")).status_code == 200


async def test_the_openapi_document_describes_the_bodies():
    async with serving() as served:
        document = (await served.http.get("/openapi.json")).json()
    schema = document["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert "messages" in schema["properties"]
    assert "$ref" not in json.dumps(document)
