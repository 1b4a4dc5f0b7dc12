"""Frozen configuration, validated when built. `config_loader` merges command line, environment and file."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class SpeculativeConfig(BaseModel):
    """How to draft. `none` proposes nothing; `ngram` looks the last tokens up in the sequence so far."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    method: Literal["none", "ngram"] = "none"
    num_speculative_tokens: int = Field(4, ge=1, le=32)
    prompt_lookup_min: int = Field(2, ge=1, le=16)
    prompt_lookup_max: int = Field(4, ge=1, le=16)

    @model_validator(mode="after")
    def _ordered(self) -> SpeculativeConfig:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min ({self.prompt_lookup_min}) is above prompt_lookup_max ({self.prompt_lookup_max})"
            )
        return self


class EngineConfig(BaseModel):
    """Everything the engine needs to start. Sizes are in tokens unless the name says otherwise."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = "smollm2-135m"
    tokenizer: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    attention_backend: Literal["auto", "torch", "native", "flashinfer"] = "auto"
    linear_backend: Literal["auto", "torch", "native"] = "auto"
    max_model_len: int | None = Field(None, ge=2)
    page_size: int = Field(16, ge=1, le=256)
    kv_cache_tokens: int | None = Field(None, ge=16)  # None: max_num_seqs x max_model_len, within kv_cache_gib
    kv_cache_gib: float = Field(1.0, gt=0)
    max_num_seqs: int = Field(64, ge=1, le=4096)
    max_num_batched_tokens: int = Field(512, ge=1)
    max_waiting: int = Field(1024, ge=1)
    enable_prefix_caching: bool = True
    batch_invariant: bool = False
    plan_ahead: bool | None = None  # plan the next step on the planner's thread; None: on CUDA only
    seed: int = 0
    num_threads: int | None = Field(None, ge=1)
    speculative: SpeculativeConfig = SpeculativeConfig()
