"""Frozen configuration, validated when built. `config_loader` merges command line, environment and file."""

from __future__ import annotations

import os
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

MAX_NUM_SEQS = 4096
MAX_SPECULATIVE_TOKENS = 32
MAX_THREADS_PER_CPU = 4
HEAD_MODEL_TYPE = "sonar_mtp"  # in config.json of an MTP head
SHIPPED = "shipped"  # as `speculative.model`: what came with the package for the target


class LossyConfig(BaseModel):
    """Typical acceptance (Cai et al. 2024, arXiv 2401.10774): faster, but lossy.

    A draft is accepted where its probability under the target is above
    min(posterior_threshold, posterior_alpha * exp(-entropy)). Requests above temperature 0, seeded or not, no longer
    follow the target's law; temperature 0 stays exact.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    posterior_threshold: float = Field(default=0.09, gt=0, lt=1, description="Probability that is always enough")
    posterior_alpha: float = Field(default=0.3, gt=0, le=1, description="Share of exp(-entropy) that is enough")


class SpeculativeConfig(BaseModel):
    """How to draft. `none` proposes nothing; `ngram` looks the last tokens up in the sequence so far; `draft_model`
    runs a smaller model of the same vocabulary; `mtp` runs a head on the target's hidden states; `oracle` replays
    known texts, for tests and measurements."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    method: Literal["none", "ngram", "draft_model", "mtp", "oracle"] = Field(
        default="none", description="How tokens are proposed"
    )
    model: str | None = Field(
        default=None,
        description="The draft model, or the head's folder: known name, folder, .gguf file or hub id; "
        "shipped: what comes with the package for the target",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="Type of the draft model's weights and KV cache; auto: as for the target"
    )
    num_speculative_tokens: int = Field(default=4, ge=1, le=MAX_SPECULATIVE_TOKENS, description="Most drafts a step")
    draft_length: Literal["fixed", "adaptive"] = Field(
        default="fixed",
        description="fixed: num_speculative_tokens drafts where there are as many; adaptive: as many of them as pay",
    )
    prompt_lookup: bool = Field(
        default=False, description="mtp: where the last tokens occurred before, draft what followed them, as ngram does"
    )
    prompt_lookup_min: int = Field(default=2, ge=1, le=16)
    prompt_lookup_max: int = Field(default=4, ge=1, le=16)
    oracle_texts: str | None = Field(default=None, description="What the oracle replays: `sonar generate --json` lines")
    oracle_rates: tuple[Annotated[float, Field(ge=0, le=1)], ...] = Field(
        default=(1.0,), min_length=1, description="Probability that the oracle's draft at a position is right"
    )
    verification: Literal["block", "token"] = Field(
        default="block", description="Lossless rule for sampled drafts of unseeded requests"
    )
    speculate_in_mixed_batches: bool = Field(default=False, description="Draft also in steps that hold prompt tokens")
    lossy: LossyConfig | None = Field(
        default=None, description="Typical acceptance: lossy above temperature 0; default: none"
    )

    @model_validator(mode="after")
    def _ordered(self) -> SpeculativeConfig:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min ({self.prompt_lookup_min}) is above prompt_lookup_max ({self.prompt_lookup_max})"
            )
        if self.method == "draft_model" and self.model is None:
            raise ValueError("method draft_model needs a model")
        if self.method not in ("draft_model", "mtp") and self.model is not None:
            raise ValueError(f"method {self.method} has no model; methods draft_model and mtp have one")
        if self.method != "mtp" and self.prompt_lookup:
            raise ValueError(f"prompt_lookup goes with method mtp, not {self.method}; method ngram looks up always")
        if (self.method == "oracle") != (self.oracle_texts is not None):
            raise ValueError("method oracle and oracle_texts go together; give both or neither")
        return self


class EngineConfig(BaseModel):
    """Everything the engine needs to start. Sizes are in tokens unless the name says otherwise."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    model: str = Field(default="smollm2-135m", description="Known name, folder, .gguf file or hub id")
    tokenizer: str | None = Field(default=None, description="Where the tokenizer is, when not with the model")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="Type of weights and KV cache; auto: the checkpoint's own, bfloat16 for GGUF"
    )
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto: CUDA where there is a GPU")
    attention_backend: Literal["auto", "torch", "native", "flashinfer"] = Field(
        default="auto", description="auto: native on the CPU, flashinfer on CUDA, else torch"
    )
    linear_backend: Literal["auto", "torch", "native"] = Field(
        default="auto", description="Matrix products; auto: native on the CPU, else torch"
    )
    quantization: Literal["none", "int8", "int4"] = Field(
        default="none", description="Weights of linear layers on the CPU, in groups of 32; int4 keeps a head in int8"
    )
    max_model_len: int | None = Field(
        default=None, ge=2, description="Most tokens of prompt and output; default: the model's"
    )
    page_size: int = Field(default=16, ge=1, le=256, description="Tokens a page of the KV cache")
    kv_cache_tokens: int | None = Field(
        default=None, ge=16, description="KV cache in tokens; default: max_num_seqs full sequences, within kv_cache_gib"
    )
    kv_cache_gib: float = Field(
        default=1.0, gt=0, description="Most memory for the KV cache when kv_cache_tokens is not given"
    )
    max_num_seqs: int = Field(default=64, ge=1, le=MAX_NUM_SEQS, description="Most sequences that run at once")
    max_num_batched_tokens: int = Field(
        default=512, ge=1, description="Most tokens a step; longer prompts come in chunks"
    )
    max_waiting: int = Field(default=1024, ge=1, description="Most requests that wait; the next one is refused")
    enable_prefix_caching: bool = Field(
        default=True, description="Keep the KV cache of prompt prefixes for later requests"
    )
    batch_invariant: bool = Field(
        default=False, description="Results do not depend, bit for bit, on what else is running"
    )
    plan_ahead: bool | None = Field(
        default=None, description="Plan the next step on the planner's thread; default: on CUDA only"
    )
    cuda_graphs: bool = Field(
        default=True, description="Replay decoding and verification as CUDA graphs where attention runs on FlashInfer"
    )
    seed: int = Field(default=0, description="Source of the seeds of requests that bring none")
    num_threads: int | None = Field(default=None, ge=1, description="CPU threads; default: one a core")
    speculative: SpeculativeConfig = SpeculativeConfig()

    @field_validator("num_threads")
    @classmethod
    def _as_this_machine_has(cls, num_threads: int | None) -> int | None:
        cpus = os.cpu_count() or 1
        if num_threads is not None and num_threads > MAX_THREADS_PER_CPU * cpus:
            raise ValueError(f"must be 1 to {MAX_THREADS_PER_CPU * cpus}; this machine has {cpus} CPUs")
        return num_threads
