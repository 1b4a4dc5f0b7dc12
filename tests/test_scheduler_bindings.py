"""The scheduler's protocol through Python: steps by id, errors by class, the packed layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scheduler_calls import assert_idle, commit, ids, make, plan, run_step, section
from sonar_engine import errors, step_buffers


def test_a_request_runs_from_submit_to_its_final_event() -> None:
    scheduler = make()
    assert not scheduler.has_work()
    scheduler.submit(7, ids(10, 11, 12), max_tokens=3)
    assert scheduler.has_work()
    first = run_step(scheduler)
    assert (first.request_ids.tolist(), first.tokens.tolist(), first.finish.tolist()) == ([7], [5], [0])
    assert scheduler.request_tokens(7).tolist() == [10, 11, 12, 5]
    assert scheduler.num_prompt_tokens(7) == 3
    last = commit(scheduler, plan(scheduler, drafts=3), accepted=1)
    assert (last.tokens.tolist(), last.finish.tolist(), last.stop_tokens.tolist()) == ([5, 5], [2], [-1])
    assert (last.num_drafted.tolist(), last.num_accepted.tolist()) == ([1], [1])
    assert last.request_ids.dtype == np.int64
    assert len(last) == 1
    assert scheduler.plan(0, None) is None
    assert_idle(scheduler)


def test_the_packed_layout_is_the_one_that_step_buffers_states() -> None:
    scheduler = make()
    scheduler.submit((1 << 40) + 3, ids(10, 11, 12))
    run_step(scheduler)
    scheduler.submit(4, ids(*range(20, 26)))
    step = plan(scheduler, slot=1)
    words = scheduler.slot(1)
    header = {name: int(words[at]) for name, at in step_buffers.HEADER.items()}
    assert header["magic"] == int.from_bytes(b"SNR1", "big")
    assert header["step_id_lo"] == step
    expected = {
        "num_reqs": 2,
        "num_decode_reqs": 1,
        "num_tokens": 7,
        "num_decode_tokens": 1,
        "max_q_len": 6,
        "max_kv_len": 6,
        "num_sample_rows": 2,
        "num_sampling_reqs": 2,
        "num_admitted": 1,
    }
    assert {name: header[name] for name in expected} == expected
    offsets = words[step_buffers.SECTION_OFFSETS_AT :][: len(step_buffers.SECTIONS)]
    assert offsets[0] == step_buffers.HEADER_WORDS
    assert not (offsets % 16).any()
    assert (np.diff(offsets) >= 0).all()
    assert section(words, "qo_indptr").tolist() == [0, 1, 7]
    assert section(words, "token_ids").tolist() == [5, 20, 21, 22, 23, 24, 25]
    assert section(words, "positions").tolist() == [3, 0, 1, 2, 3, 4, 5]
    assert section(words, "sample_rows").tolist() == [0, 6]
    assert section(words, "admitted_ids").tolist() == [4, 0]
    assert header["num_words"] == int(offsets[-1]) + 16
    scheduler.revert(step)


def test_the_two_slots_are_views_of_the_same_memory_at_each_call() -> None:
    scheduler = make()
    first, second = scheduler.slot(0), scheduler.slot(1)
    assert first.shape == second.shape == (scheduler.slot_words,)
    assert first.ctypes.data == scheduler.slot(0).ctypes.data != second.ctypes.data
    assert first.ctypes.data % 64 == second.ctypes.data % 64 == 0
    scheduler.submit(1, ids(1))
    step = plan(scheduler, slot=1)
    assert first[0] == 0
    assert second[0] != 0
    scheduler.revert(step)
    del scheduler
    assert second[0] != 0, "a view keeps the memory alive"
    with pytest.raises(errors.ConfigError, match="slots are 0 and 1"):
        make().slot(2)


def test_steps_are_committed_or_reverted_once_and_in_order() -> None:
    scheduler = make()
    scheduler.submit(1, ids(1, 2))
    step = plan(scheduler)
    with pytest.raises(errors.StaleStepError, match="still in flight"):
        scheduler.plan(1, None)
    with pytest.raises(errors.StaleStepError, match=f"step {step + 1} is not in flight"):
        commit(scheduler, step + 1)
    scheduler.revert(step)
    with pytest.raises(errors.StaleStepError, match="none is"):
        commit(scheduler, step)
    again = plan(scheduler)
    assert again > step
    commit(scheduler, again)
    with pytest.raises(errors.StaleStepError):
        scheduler.revert(again)
    scheduler.check_integrity()


def test_a_verdict_that_does_not_fit_leaves_the_step_in_flight() -> None:
    scheduler = make()
    scheduler.submit(1, ids(1, 2))
    step = plan(scheduler)
    tokens = np.full((1, 1), 5, np.int32)
    for emitted, bad, words in [
        (ids(2), tokens, "row 0 emitted 2 tokens"),
        (ids(0), tokens, "row 0 emitted 0 tokens"),
        (ids(1, 1), np.full((2, 1), 5, np.int32), "num_emitted has 2 rows; the step has 1"),
        (ids(1), np.full((1, 1), 100, np.int32), "token id 100"),
        (ids(1), np.full((2, 1), 5, np.int32), "tokens holds 2 ids"),
    ]:
        with pytest.raises(errors.VerdictError, match=words):
            scheduler.commit(step, emitted, bad)
    assert commit(scheduler, step).tokens.tolist() == [5]


def test_arrays_of_another_type_are_refused_by_name() -> None:
    scheduler = make()
    with pytest.raises(TypeError, match=r"prompt must be an int32 numpy array .* got int64 of shape \(2,\)"):
        scheduler.submit(1, np.array([1, 2]))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"prompt must be .* got list"):
        scheduler.submit(1, [1, 2])  # type: ignore[arg-type]
    scheduler.submit(1, ids(1, 2))
    with pytest.raises(TypeError, match="draft_lens"):
        scheduler.plan(0, np.zeros((2, 4), np.int32))
    with pytest.raises(errors.ConfigError, match="draft_lens has 7 entries"):
        scheduler.plan(0, np.zeros(7, np.int32))
    with pytest.raises(errors.ConfigError, match="must be contiguous"):
        scheduler.plan(0, np.zeros(16, np.int32)[::2])
    step = plan(scheduler)
    with pytest.raises(TypeError, match="tokens"):
        scheduler.commit(step, ids(1), ids(5))
    scheduler.revert(step)


@pytest.mark.parametrize(
    ("options", "param", "code"),
    [
        ({"prompt": ids()}, "prompt", "empty_prompt"),
        ({"prompt": np.ones(64, np.int32)}, "prompt", "context_length_exceeded"),
        ({"prompt": ids(1, -1)}, "prompt", "token_out_of_range"),
        ({"prompt": ids(1, 100)}, "prompt", "token_out_of_range"),
        ({"stop_token_ids": ids(100)}, "stop_token_ids", "token_out_of_range"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"max_tokens": -1}, "max_tokens", "invalid_value"),
        ({"max_tokens": 1, "min_tokens": 2}, "min_tokens", "invalid_value"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens", "invalid_value"),
        ({"request_id": -1}, "request_id", "invalid_value"),
    ],
)
def test_a_bad_request_fails_only_itself_and_names_its_field(options: dict[str, Any], param: str, code: str) -> None:
    scheduler = make()
    fields: dict[str, Any] = {"request_id": 1, "prompt": ids(1, 2)} | options
    with pytest.raises(errors.InvalidRequestError) as caught:
        scheduler.submit(fields.pop("request_id"), fields.pop("prompt"), **fields)
    assert (caught.value.param, caught.value.code) == (param, code)
    assert "must" in str(caught.value) or "needs" in str(caught.value) or "may" in str(caught.value)
    scheduler.submit(1, ids(1, 2), max_tokens=1)
    run_step(scheduler)
    assert_idle(scheduler)


def test_a_full_queue_and_an_id_in_use_are_refused_before_any_plan() -> None:
    scheduler = make(max_waiting=2)
    scheduler.submit(1, ids(1))
    with pytest.raises(errors.InvalidRequestError, match="already in use"):
        scheduler.submit(1, ids(1))
    scheduler.submit(2, ids(1))
    with pytest.raises(errors.QueueFullError, match="2 requests are waiting, the limit is 2"):
        scheduler.submit(3, ids(1))
    run_step(scheduler)
    scheduler.submit(3, ids(1))
    scheduler.abort(1)
    run_step(scheduler)
    scheduler.submit(1, ids(1))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_pages": 15}, "needs 16 pages"),
        ({"page_size": 0}, "page_size is 0"),
        ({"page_size": -1}, "page_size is -1"),
        ({"max_model_len": 1}, "max_model_len is 1"),
        ({"cache_key": b"short"}, "5 bytes; it must have 32"),
        ({"eos_token_ids": ids(100)}, "EOS token id 100"),
        ({"num_speculative_tokens": 64}, "must be below max_model_len"),
        ({"num_pages": 2**31}, "must be below 2147483648"),
    ],
)
def test_a_configuration_that_cannot_work_says_why(options: dict[str, Any], words: str) -> None:
    with pytest.raises(errors.ConfigError, match=words):
        make(**options)


def test_every_request_option_does_what_it_says() -> None:
    scheduler = make(max_num_seqs=1)
    scheduler.submit(1, ids(1), max_tokens=9, min_tokens=1, stop_token_ids=ids(6, 7), priority=5)
    scheduler.submit(2, ids(1), max_tokens=1, priority=-5)
    scheduler.submit(3, ids(1), max_tokens=2, ignore_eos=True, priority=4, num_speculative_tokens=0)
    assert run_step(scheduler).request_ids.tolist() == [2]
    assert run_step(scheduler, token=2).finish.tolist() == [0], "EOS is ignored"
    step = scheduler.plan(0, np.full(1, 3, np.int32))
    assert step is not None
    assert section(scheduler.slot(0), "num_draft_tokens").tolist() == [0]
    assert commit(scheduler, step).finish.tolist() == [2]
    assert run_step(scheduler, token=6).finish.tolist() == [0], "below min_tokens"
    last = run_step(scheduler, token=7)
    assert (last.finish.tolist(), last.stop_tokens.tolist()) == ([1], [7])
    assert_idle(scheduler)


def test_prefixes_are_shared_under_the_same_salt_until_the_cache_is_reset() -> None:
    scheduler = make()

    def num_cached(request_id: int, salt: bytes | None) -> int:
        scheduler.submit(request_id, np.arange(9, dtype=np.int32) + 10, max_tokens=1, cache_salt=salt)
        return int(run_step(scheduler).num_cached[0])

    assert [num_cached(1, None), num_cached(2, None), num_cached(3, b"x"), num_cached(4, b"x")] == [0, 8, 0, 8]
    stats = scheduler.stats()
    assert (stats.prefix_queries, stats.prefix_hits) == (36, 16)
    assert stats.num_cached_pages > 0
    assert scheduler.reset_prefix_cache()
    assert scheduler.stats().num_cached_pages == 0
    assert num_cached(5, None) == 0


@pytest.mark.parametrize(("covers", "hits"), [(False, 8), (True, 4)])
def test_a_page_before_another_token_is_a_hit_unless_its_hash_covers_the_next_token(covers: bool, hits: int) -> None:
    scheduler = make(page_hash_covers_next_token=covers)
    for request_id, last, expected in ((1, 30, 0), (2, 30, 8), (3, 31, hits)):
        scheduler.submit(request_id, ids(*range(10, 18), last), max_tokens=1)
        assert int(run_step(scheduler).num_cached[0]) == expected


def test_aborts_give_one_final_event_at_any_moment() -> None:
    scheduler = make()
    for request_id in (1, 2, 3):
        scheduler.submit(request_id, ids(1, 2))
    scheduler.abort(3)  # still in the inbox
    scheduler.abort(99)
    polled = scheduler.poll()
    assert polled is not None
    assert (polled.request_ids.tolist(), polled.finish.tolist(), polled.batch_rows.tolist()) == ([3], [3], [-1])
    assert scheduler.poll() is None
    step = plan(scheduler)
    scheduler.abort(1)
    scheduler.abort(1)
    events = commit(scheduler, step)
    assert events.request_ids.tolist() == [1, 2], "the abort waits for the next plan, commit or poll"
    polled = scheduler.poll()
    assert polled is not None
    assert (polled.request_ids.tolist(), polled.finish.tolist()) == ([1], [3])
    scheduler.abort(2)
    step_or_none = scheduler.plan(0, None)
    assert step_or_none is None
    assert scheduler.has_work(), "a final event is still to be polled"
    assert scheduler.poll() is not None
    assert_idle(scheduler)


def test_unknown_requests_are_named() -> None:
    scheduler = make()
    with pytest.raises(errors.InvalidRequestError, match="no live request 5"):
        scheduler.request_tokens(5)
    with pytest.raises(errors.InvalidRequestError, match="no live request 5"):
        scheduler.num_prompt_tokens(5)


def test_ngrams_are_written_by_slot() -> None:
    scheduler = make()
    scheduler.submit(1, ids(7, 8, 9, 7, 8))
    scheduler.submit(2, ids(3, 4))
    run_step(scheduler, token=9)
    tokens, lens = np.full((8, 2), -1, np.int32), np.full(8, -1, np.int32)
    assert scheduler.propose_ngram(2, 2, 3, tokens, lens) == 2
    assert lens.tolist() == [2, 0, 0, 0, 0, 0, 0, 0]
    assert tokens[0].tolist() == [7, 8]
    assert (tokens[1:] == -1).all()
    with pytest.raises(errors.ConfigError, match="min_n"):
        scheduler.propose_ngram(2, 3, 2, tokens, lens)
    with pytest.raises(errors.ConfigError, match="must be k = 3"):
        scheduler.propose_ngram(3, 2, 3, tokens, lens)
