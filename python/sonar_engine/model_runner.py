"""Runs the target model: weights, operations, attention and KV cache of one process, behind two calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from sonar_kernels import fill_draft_tokens

from sonar_engine.attention.select import AttentionBackend, select_attention
from sonar_engine.config import EngineConfig
from sonar_engine.cuda_graphs import CudaGraphs, Input, open_graphs, wants_graphs
from sonar_engine.drafters.base import Draft
from sonar_engine.errors import ConfigError
from sonar_engine.kv_cache import KvCache, KvCachePlan, allocate_kv_cache, allocate_layers, plan_kv_cache
from sonar_engine.layers.base import Ops
from sonar_engine.layers.select import LinearBackend, cpu_kernels, num_threads, select_ops
from sonar_engine.models.llama import LlamaForCausalLM
from sonar_engine.models.model_config import ModelConfig
from sonar_engine.models.weights import load_weights
from sonar_engine.step_buffers import BatchMetadata

if TYPE_CHECKING:
    from sonar_engine._scheduler import CpuKernels
    from sonar_engine.models.registry import ResolvedModel

Progress = Callable[[str, int, int], None]  # (what, done, total)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class _Place:
    """What a model is loaded into."""

    kv_cache: KvCache
    ops: Ops
    linear_backend: LinearBackend
    dtype: torch.dtype
    max_model_len: int  # tokens


@dataclass(frozen=True)
class ModelRunner:
    """A loaded model with its KV cache. T = tokens of a batch, H = hidden size, S = sampled rows, V = vocabulary."""

    config: ModelConfig
    model: LlamaForCausalLM
    ops: Ops
    kv_cache: KvCache
    dtype: torch.dtype
    device: torch.device
    max_model_len: int  # tokens, prompt and output together
    linear_backend: LinearBackend
    attention_backend: AttentionBackend
    cpu_kernels: CpuKernels | None  # of the model's operations, when they run on them
    weight_bytes: int  # parameters as loaded, a tied head once
    graphs: CudaGraphs | None = None  # of the forward pass

    @classmethod
    def load(
        cls,
        engine_config: EngineConfig,
        resolved: ResolvedModel,
        progress: Progress | None = None,
        drafter_bytes_per_token: int = 0,
    ) -> ModelRunner:
        """Loads and warms up a folder or a .gguf file. `progress("weights", elements loaded, elements in all)`.

        Sizes and backends are settled before any weight is read; `drafter_bytes_per_token` is what the drafter adds
        to the KV cache. Raises ConfigError for options that cannot work with this model or machine, ModelLoadError
        for files that are damaged or not supported.
        """
        torch.set_num_threads(num_threads(engine_config))
        device = choose_device(engine_config)
        config = ModelConfig.load(resolved.path)
        dtype = choose_dtype(engine_config, config)
        plan = choose_kv_cache(engine_config, config, drafter_bytes_per_token)
        plan = replace(plan, has_spare_page=wants_graphs(engine_config, device))
        linear_backend, ops = select_ops(engine_config, device)
        kv_cache = allocate_kv_cache(plan, config, engine_config.max_num_seqs, dtype, device)
        place = _Place(kv_cache, ops, linear_backend, dtype, choose_max_model_len(engine_config, config))
        return cls._load_into(place, engine_config, resolved, config, progress)

    def load_beside(
        self, engine_config: EngineConfig, resolved: ResolvedModel, progress: Progress | None = None
    ) -> ModelRunner:
        """Loads a second model over the pages, the page table and the operations of this one.

        Its layers of the KV cache are its own, with the same page ids; the plan must have counted them. As `load`
        for the rest. Not while requests run: the warm-up writes to their pages.
        """
        config = ModelConfig.load(resolved.path)
        dtype = choose_dtype(engine_config, config)
        layers = allocate_layers(self.kv_cache.plan, config, dtype, self.device)
        kv_cache = replace(self.kv_cache, layers=layers)
        place = _Place(kv_cache, self.ops, self.linear_backend, dtype, self.max_model_len)
        return self._load_into(place, engine_config, resolved, config, progress)

    @classmethod
    def _load_into(
        cls,
        place: _Place,
        engine_config: EngineConfig,
        resolved: ResolvedModel,
        config: ModelConfig,
        progress: Progress | None,
    ) -> ModelRunner:
        kv_cache, ops = place.kv_cache, place.ops
        device = kv_cache.page_table.device
        attention_backend, attention = select_attention(engine_config, config, kv_cache, ops)
        on_weights = None if progress is None else partial(progress, "weights")
        weights = _load_weights(engine_config, resolved.path, config, place, on_weights)
        weight_bytes = sum(tensor.nbytes for tensor in weights.values())
        model = LlamaForCausalLM(config, weights, ops, attention, max_positions=kv_cache.plan.reserved_len)
        runner = cls(
            config=config,
            model=model,
            ops=ops,
            kv_cache=kv_cache,
            dtype=place.dtype,
            device=device,
            max_model_len=place.max_model_len,
            linear_backend=place.linear_backend,
            attention_backend=attention_backend,
            cpu_kernels=cpu_kernels(ops),
            weight_bytes=weight_bytes,
        )
        runner.warm_up()
        graphs = open_graphs(
            engine_config,
            kv_cache,
            attention,
            lambda positions, token_ids: (model.run(positions, token_ids)[0],),
            [Input((), torch.int32)],
        )
        return replace(runner, graphs=graphs)

    @property
    def num_pages(self) -> int:
        return self.kv_cache.plan.num_pages

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self.config.vocab_size

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self.config.eos_token_ids

    @property
    def kv_cache_bytes(self) -> int:
        return self.kv_cache.plan.num_bytes

    @property
    def page_table(self) -> torch.Tensor:
        """int32 [max_num_seqs, max_pages_per_seq] on the device, by slot."""
        return self.kv_cache.page_table

    def forward(self, batch: BatchMetadata, draft: Draft | None = None) -> torch.Tensor:
        """Final hidden states [T, H]; writes the batch's keys and values. A graph is replayed where there is one.

        `draft` goes into `batch.token_ids` where the plan left room for it; None: the batch has no drafts.
        """
        if draft is not None and batch.num_drafts:
            fill_draft_tokens(batch.token_ids, batch.token_reqs, batch.qo_indptr, draft.tokens)
        replayed = None if self.graphs is None else self.graphs.replay(batch, batch.token_ids)
        return self.model.forward(batch.token_ids, batch) if replayed is None else replayed[0]

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """hidden [T, H], rows int32 [S] -> fp32 [S, V]."""
        return self.model.logits(hidden.index_select(0, rows))

    def warm_up(self) -> None:
        """One decode step and one short prompt chunk over zeroed pages, so that the first request pays no set-up."""
        for num_tokens in (1, min(8, self.max_model_len, self.kv_cache.plan.page_size)):
            batch = _warm_up_batch(num_tokens, self.page_table)
            self.logits(self.forward(batch), batch.sample_rows)
        for layer in self.kv_cache.layers:
            layer[0].zero_()


def choose_device(engine_config: EngineConfig) -> torch.device:
    """`auto`: CUDA when there is one."""
    if engine_config.device == "cpu" or (engine_config.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("device=cuda, but torch finds no CUDA device; use device=cpu or auto")
    return torch.device("cuda", torch.cuda.current_device())


def choose_dtype(engine_config: EngineConfig, config: ModelConfig) -> torch.dtype:
    """`auto`: the checkpoint's own."""
    return config.torch_dtype if engine_config.dtype == "auto" else _DTYPES[engine_config.dtype]


def choose_max_model_len(engine_config: EngineConfig, config: ModelConfig) -> int:
    """The model's own limit, or the lower one that was asked for."""
    asked, limit = engine_config.max_model_len, config.max_position_embeddings
    if asked is not None and asked > limit:
        raise ConfigError(f"max_model_len={asked} is above the model's {limit} positions; ask for at most {limit}")
    return limit if asked is None else asked


def choose_kv_cache(engine_config: EngineConfig, config: ModelConfig, drafter_bytes_per_token: int) -> KvCachePlan:
    """Raises ConfigError when one sequence does not fit, in tokens or in memory."""
    max_model_len, dtype = choose_max_model_len(engine_config, config), choose_dtype(engine_config, config)
    return plan_kv_cache(engine_config, config, max_model_len, dtype, drafter_bytes_per_token)


def _load_weights(
    engine_config: EngineConfig,
    path: Path,
    config: ModelConfig,
    place: _Place,
    progress: Callable[[int, int], None] | None,
) -> dict[str, torch.Tensor]:
    """Matrices that will be quantised come in fp32, so that those of a quantised file are found again exactly."""
    device = place.kv_cache.page_table.device
    if engine_config.quantization == "none":
        return load_weights(path, config, place.dtype, device, progress)
    weights = load_weights(path, config, torch.float32, device, progress)
    for name, tensor in weights.items():
        if not name.endswith("_proj.weight"):
            weights[name] = tensor.to(place.dtype)
    return weights


def _warm_up_batch(num_tokens: int, page_table: torch.Tensor) -> BatchMetadata:
    """One row in slot 0 with `num_tokens` new tokens of id 0, all in page 0, which no request holds yet."""
    last = num_tokens - 1
    sections = {
        "slots": [0],
        "qo_indptr": [0, num_tokens],
        "num_draft_tokens": [0],
        "num_computed_tokens": [0],
        "kv_len": [num_tokens],
        "paged_kv_indptr": [0, 1],
        "paged_kv_last_page_len": [num_tokens],
        "output_pos": [0],
        "next_prompt_token": [-1],
        "sample_indptr": [0, 1],
        "sample_rows": [last],
        "sample_reqs": [0],
        "token_ids": [0] * num_tokens,
        "positions": list(range(num_tokens)),
        "slot_mapping": list(range(num_tokens)),
        "token_reqs": [0] * num_tokens,
    }
    tensors = {name: torch.tensor(values, dtype=torch.int32) for name, values in sections.items()}
    return BatchMetadata(
        step_id=0,
        num_reqs=1,
        num_decode_reqs=int(num_tokens == 1),
        num_tokens=num_tokens,
        num_decode_tokens=int(num_tokens == 1),
        num_drafts=0,
        max_draft_tokens=0,
        max_q_len=num_tokens,
        max_kv_len=num_tokens,
        num_sample_rows=1,
        page_table=page_table,
        host={name: tensor.numpy() for name, tensor in tensors.items()},
        admitted=[],
        **{name: tensor.to(page_table.device) for name, tensor in tensors.items()},
    )
