"""The words that all rooms share: sampling parameters, finish reasons, outputs."""

from __future__ import annotations

from typing import Literal

import msgspec

FinishReason = Literal["stop", "length", "abort", "error"]
StructuredKind = Literal["json_schema", "json_object", "regex", "choice", "grammar"]


class StructuredOutput(msgspec.Struct, frozen=True, kw_only=True):
    """A form that the output must have. Every text of that form stays possible, and no other.

    `content` is a JSON schema's text, nothing for `json_object`, a regular expression, a JSON list of the texts to
    choose from, or a grammar: Lark in llguidance's dialect, or GBNF.
    """

    kind: StructuredKind
    content: str = ""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How one sequence is sampled and when it ends. Checked by `sampling.validation.validate`.

    `temperature` 0 is greedy (argmax, lowest id on ties). `top_k` 0 or -1, `top_p` 1 and `min_p` 0 are off.
    `seed` makes every token a pure function of (seed, output position, processed logits).
    `logprobs` is the number of top entries to report beside the sampled token's own (None: none at all),
    `prompt_logprobs` the same for the prompt's tokens from the second on.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    banned_token_ids: list[int] | None = None
    seed: int | None = None
    max_tokens: int | None = None  # None: up to the context limit
    min_tokens: int = 0
    stop: list[str] = []
    stop_token_ids: list[int] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    speculative_enabled: bool = True
    num_speculative_tokens: int | None = None  # a cap below the engine's own; None: the engine's
    priority: int = 0  # lower runs earlier
    cache_salt: str | None = None  # requests share cached prefixes only under the same salt
    structured: StructuredOutput | None = None  # the form of the output


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities at one output position: the sampled token's, then the most likely ones, best first."""

    logprob: float
    rank: int  # 1 = most likely
    top_ids: list[int]
    top_logprobs: list[float]


class SpeculationMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Acceptance of one request. Acceptance length counts the bonus token; 1 means no gain."""

    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    acceptance_histogram: list[int] = []  # [i] = steps that accepted exactly i drafts

    @property
    def mean_acceptance_length(self) -> float | None:
        if self.num_spec_steps == 0:
            return None
        return 1 + self.num_accepted_draft_tokens / self.num_spec_steps

    @property
    def draft_acceptance_rate(self) -> float | None:
        if self.num_draft_tokens == 0:
            return None
        return self.num_accepted_draft_tokens / self.num_draft_tokens


class RequestMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """What one finished request cost, in seconds of the engine's monotonic clock."""

    queue_time: float
    time_to_first_token: float
    decode_time: float  # from the first token to the last
    e2e_latency: float
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    speculation: SpeculationMetrics = SpeculationMetrics()


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True):
    """New tokens of one sequence after one step; `finish_reason` is set on the last one.

    `stop_reason` is the stop token's id when a user's stop token ended it, None for EOS. The first `num_accepted`
    tokens were drafts; a stop may have left fewer tokens than that. `prompt_logprobs` come with the first tokens, an
    entry for each token of the prompt but the first.
    """

    request_id: int
    token_ids: list[int]
    num_accepted: int = 0
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    metrics: RequestMetrics | None = None


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a started engine is, for clients and start-up output."""

    model_name: str
    max_model_len: int
    vocab_size: int  # width of the logits: every id is below it
    eos_token_ids: list[int]
    dtype: str
    device: str
    num_pages: int
    page_size: int
    max_num_seqs: int
    drafter: str
    num_speculative_tokens: int
    lossy: bool = False  # typical acceptance is on: above temperature 0 texts are not the target's own
    version: str
    generation_defaults: dict[str, int | float] = {}  # the model's own sampling values, where a request gives none


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since start and gauges of now. Tokens unless the name says otherwise."""

    num_running: int
    num_waiting: int
    num_pages: int
    num_free_pages: int
    num_cached_pages: int  # held by the prefix cache alone, given up on demand
    kv_cache_usage: float  # share of pages owned by requests, 0..1
    prefix_queries: int
    prefix_hits: int
    num_preemptions: int
    num_steps: int
    prompt_tokens: int
    generation_tokens: int
    num_drafts: int  # row-steps that verified at least one draft token
    num_draft_tokens: int
    num_accepted_tokens: int
    accepted_per_pos: list[int]
    step_seconds: dict[str, float]  # totals by stage
    device_idle_seconds: float
    draft_length: int = 0  # most drafts a row now


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """One finished sequence of `Engine.generate`."""

    index: int
    text: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: int | str | None
    logprobs: list[TokenLogprobs] | None
    prompt_logprobs: list[TokenLogprobs] | None = None  # of the prompt's tokens from the second on
    metrics: RequestMetrics
