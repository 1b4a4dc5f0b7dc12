"""What each stage of training is told. Frozen, validated when built; every field is an option of `sonar train`."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from sonar_engine.config import EngineConfig, SpeculativeConfig
from sonar_engine.errors import ConfigError

Temperature = Annotated[float, Field(ge=0, le=2)]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
# Settings of `sonar train fit` that may change between two runs over one folder.
_FREE = {"out", "captures", "save_every", "num_threads", "tensorboard", "device", "model"}


class _Stage(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class _TargetStage(_Stage):
    """A stage that runs the target in the engine."""

    model: str = Field(default="smollm2-135m", description="The target: known name, folder, .gguf file or hub id")
    dtype: Dtype = Field(default="auto", description="Type of the target's weights; auto: the checkpoint's own")
    max_num_seqs: int = Field(default=32, ge=1, le=1024, description="Sequences that run at once")
    max_num_batched_tokens: int = Field(default=512, ge=16, description="Tokens a step")
    num_threads: int | None = Field(default=None, ge=1, description="CPU threads; default: one a core")

    def engine_config(self, **fields: Any) -> EngineConfig:
        """The engine's configuration; `fields` are further ones, or other ones."""
        own = {
            "model": self.model,
            "dtype": self.dtype,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": max(self.max_num_batched_tokens, self.max_num_seqs),
            "num_threads": self.num_threads,
        }
        return EngineConfig(**{**own, **fields})


class DataConfig(_TargetStage):
    """`sonar train data`: prompts, and the target's answers to them."""

    out: Path = Field(description="Folder for the texts; one that was begun with the same settings is continued")
    states: Path | None = Field(
        default=None,
        description="Folder for the hidden states too, as `sonar train capture` would fill it, at a third of the cost; "
        "default: none",
    )
    shard_tokens: int = Field(default=65536, ge=1, description="Tokens a file of states")
    prompts: tuple[Path, ...] = Field(
        default=(), description="Prompt files, chat .jsonl or plain .txt; default: none, the target writes all prompts"
    )
    tokens: int = Field(default=1_000_000, ge=1, description="Answer tokens in all; may be raised later")
    self_share: float = Field(default=0.5, ge=0, le=1, description="Share of prompts that the target writes itself")
    rounds: int = Field(default=1, ge=1, description="Answers to each prompt of the files")
    temperature: tuple[Temperature, ...] = Field(
        default=(1.0,), min_length=1, description="Of the answers, as they will be served; several take turns"
    )
    prompt_temperature: Temperature = Field(default=1.0, description="Of the prompts that the target writes")
    max_prompt_tokens: int = Field(default=512, ge=1, description="Longer prompts are left out")
    max_answer_tokens: int = Field(default=512, ge=1, description="Longer answers are cut")
    seed: int = Field(default=0, description="Another seed, other texts")

    @model_validator(mode="after")
    def _has_prompts(self) -> DataConfig:
        if not self.prompts and self.self_share < 1:
            object.__setattr__(self, "self_share", 1.0)
        return self


class CaptureConfig(_TargetStage):
    """`sonar train capture`: the target's hidden states over the texts."""

    data: Path = Field(description="Folder of `sonar train data`")
    out: Path = Field(description="Folder for the states; one that was begun is continued")
    shard_tokens: int = Field(default=65536, ge=1, description="Tokens a file")


# Options of `sonar train fit` that mean something for one kind alone; the other takes no value but the default.
_OPTIONS_OF_KIND = {
    "head": (
        "init",
        "without_norms",
        "next_feature",
        "draft_vocab_size",
        "num_steps",
        "step_decay",
        "feature_loss",
    ),
    "draft": ("layers",),
}


class FitConfig(_Stage):
    """`sonar train fit`: a head or a draft model, from captured states."""

    kind: Literal["head", "draft"] = Field(
        default="head", description="What is trained: an MTP head, or a draft model of some of the target's layers"
    )
    captures: tuple[Path, ...] = Field(min_length=1, description="Folders of `sonar train capture`; all are used")
    out: Path = Field(description="Folder for the head or draft, the log and the training state")
    model: str = Field(default="smollm2-135m", description="The target that the states are of")
    init_from: Path | None = Field(
        default=None, description="A head or draft to go on from; default: none, see init and layers"
    )
    init: Literal["regression", "copy", "random"] = Field(
        default="regression", description="How a new head begins: foreseeing the next state, as the target's last layer"
    )
    num_layers: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Layers of a new head; or of a new draft: evenly spaced in the target, its first and last included",
    )
    layers: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        default=(),
        description="The target's layers, from 0, that a new draft begins as, such as 0,1,29; default: see num_layers",
    )
    without_norms: tuple[Literal["embedding", "feature", "input", "post_attention", "final"], ...] = Field(
        default=(), description="Norms that a new head does not have; default: it has all"
    )
    next_feature: Literal["normed", "raw"] = Field(default="normed", description="What a new head feeds back")
    draft_vocab_size: int | None = Field(
        default=8192, ge=1, description="Ids that a new head can draft, the most frequent of the answers"
    )
    num_steps: int = Field(default=3, ge=1, le=16, description="Draft tokens that are trained for, K")
    step_decay: float = Field(default=0.9, gt=0, le=1, description="Weight of each draft step beside the one before it")
    feature_loss: float = Field(default=0.0, ge=0, description="Weight of the smooth L1 loss on features")
    epochs: int = Field(default=4, ge=1, description="Passes over the texts")
    max_steps: int | None = Field(default=None, ge=1, description="Optimiser steps at most; default: none")
    row_tokens: int = Field(default=1024, ge=8, description="Tokens of a packed row; longer texts are cut")
    batch_rows: int = Field(default=4, ge=1, description="Rows of an optimiser step, over all ranks")
    learning_rate: float = Field(default=5e-4, gt=0, description="At its highest")
    final_rate: float = Field(default=0.05, ge=0, le=1, description="Share of it at the end of the cosine")
    warmup_steps: int = Field(default=50, ge=0, description="Steps of rising rate")
    weight_decay: float = Field(default=0.01, ge=0, description="Of matrices")
    clip: float = Field(default=1.0, gt=0, description="Longest gradient")
    compute: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto", description="Arithmetic of what is trained; auto: bfloat16 on CUDA. Master weights are float32"
    )
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto: CUDA where there is a GPU")
    num_threads: int | None = Field(default=None, ge=1, description="CPU threads; default: one a core")
    validation_share: float = Field(default=0.03, ge=0, lt=1, description="Texts kept out, chosen by their tokens")
    validation_rows: int = Field(default=32, ge=1, description="Most packed rows of a validation")
    save_every: int = Field(
        default=100, ge=1, description="Steps between validations, each saves state and head or draft"
    )
    tensorboard: bool = Field(default=False, description="Write TensorBoard files too")
    seed: int = Field(default=0, description="Of the order of texts, and of random initial values")

    @field_validator("without_norms")
    @classmethod
    def _once_each(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(sorted(set(names)))

    @field_validator("layers", mode="before")
    @classmethod
    def _split_at_commas(cls, value: Any) -> Any:
        values = value if isinstance(value, list | tuple) else [value]
        return [part for each in values for part in (each.split(",") if isinstance(each, str) else [each])]

    @field_validator("layers")
    @classmethod
    def _ascending(cls, layers: tuple[int, ...]) -> tuple[int, ...]:
        if any(first >= second for first, second in pairwise(layers)):
            raise ValueError("layers must be given in ascending order, each once, such as 0,1,29")
        return layers

    @model_validator(mode="after")
    def _options_are_of_its_kind(self) -> FitConfig:
        for kind, options in _OPTIONS_OF_KIND.items():
            others = [name for name in options if getattr(self, name) != FitConfig.model_fields[name].default]
            if kind != self.kind and others:
                raise ValueError(f"{others[0]} is for kind {kind}, and kind is {self.kind}; leave it out")
        if self.kind == "draft" and self.init_from is None and not self.layers and self.num_layers == 1:
            raise ValueError("kind draft needs layers, such as 0,1,29, or num_layers, at least 2")
        if self.layers and (self.num_layers != 1 or self.init_from is not None):
            other = "init_from" if self.init_from is not None else "num_layers"
            raise ValueError(f"layers and {other} both say which layers a draft has; give one of them")
        return self

    @property
    def exported(self) -> Path:
        """The folder that serves."""
        return self.out / self.kind

    def settings(self) -> dict[str, Any]:
        """What the result is a function of, beside the states; what concerns another kind is left out."""
        foreign = {name for kind, options in _OPTIONS_OF_KIND.items() if kind != self.kind for name in options}
        default = {"kind"} if self.kind == "head" else set()
        return self.model_dump(mode="json", exclude=_FREE | foreign | default)


class EvalConfig(_TargetStage):
    """`sonar train eval`: what a head or draft is worth, by the engine that drafts with it."""

    head: Path = Field(description="Folder of the head, or of the draft model")
    out: Path = Field(description="Folder for report.json and the plots")
    prompts: tuple[Path, ...] = Field(min_length=1, description="Prompt files; a row's `category` is its task")
    per_task: int | None = Field(default=None, ge=1, description="Prompts of each task at most; default: all")
    temperature: tuple[Temperature, ...] = Field(default=(0.0,), min_length=1, description="Temperatures to measure at")
    num_speculative_tokens: int = Field(default=3, ge=1, le=16, description="Draft tokens a step")
    prompt_lookup: bool = Field(default=False, description="A head drafts from the text itself where it repeats itself")
    max_answer_tokens: int = Field(default=256, ge=2, description="Longest answers")
    timed_prompts: int = Field(default=8, ge=0, description="Prompts for tokens/s with and without; 0: none")
    seed: int = Field(default=0, description="Of sampled answers")

    def speculative(self, method: Literal["mtp", "draft_model"]) -> SpeculativeConfig:
        if self.prompt_lookup and method != "mtp":
            raise ConfigError(f"prompt_lookup goes with a head, and {self.head} is a draft model; leave it out")
        k, lookup = self.num_speculative_tokens, self.prompt_lookup
        return SpeculativeConfig(method=method, model=str(self.head), num_speculative_tokens=k, prompt_lookup=lookup)
