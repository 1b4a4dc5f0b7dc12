"""Models whose passes are kernels of a simulated device and whose tokens are a rule: a target, a draft, a head.

The rule gives each token by the one before it and its position. What a pass gives is known when it is queued; the
loop reads it no earlier than a `HostCopy` brings it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F

from sonar_engine.attention.base import Attention
from sonar_engine.config import EngineConfig
from sonar_engine.drafters.mtp_head import HeadStates
from sonar_engine.kv_cache import KvCache, plan_kv_cache
from sonar_engine.layers.native import NativeOps
from sonar_engine.model_runner import ModelRunner
from sonar_engine.models.model_config import ModelConfig
from sonar_engine.step_buffers import BatchMetadata
from sonar_engine.testing.simulated_device import SimulatedDevice

if TYPE_CHECKING:
    from sonar_engine.drafters.mtp_head import MtpHead
    from sonar_engine.models.llama import LlamaForCausalLM

VOCAB_SIZE = 61


def next_tokens(tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The target's tokens behind `tokens` [T] at `positions` [T], int64 [T]."""
    return (5 * tokens.long() + 3 * positions.long() + 1) % VOCAB_SIZE


class SimulatedModel:
    """In the place of `LlamaForCausalLM`. Its hidden state [T, 1] is the token that comes next.

    Of `wrong_every` tokens about one is not the target's; 0: none.
    """

    def __init__(self, device: SimulatedDevice, wrong_every: int = 0) -> None:
        self.embedding = torch.arange(VOCAB_SIZE, dtype=torch.float32)[:, None]
        self._device = device
        self._wrong_every = wrong_every

    def forward(self, token_ids: torch.Tensor, batch: BatchMetadata) -> torch.Tensor:
        self._device.queue_pass()
        return self.follow(token_ids, batch.positions)

    def follow(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """fp32 [T, 1]"""
        following = next_tokens(tokens, positions)
        if self._wrong_every:
            is_wrong = (tokens + 7 * positions) % self._wrong_every == 0
            following = (following + is_wrong) % VOCAB_SIZE
        return following.float()[:, None]

    def output(self, states: torch.Tensor) -> torch.Tensor:
        """[N, 1] -> fp32 [N, V]"""
        return F.one_hot(states[:, 0].long(), VOCAB_SIZE).float()

    logits = output


class SimulatedHead:
    """In the place of `MtpHead`: the draft's rule, one position on."""

    feeds_back_normed = True

    def __init__(self, model: SimulatedModel, device: SimulatedDevice) -> None:
        self._model = model
        self._device = device

    def __call__(
        self, embeddings: torch.Tensor, features: torch.Tensor, positions: torch.Tensor, attention: object
    ) -> HeadStates:
        self._device.queue_pass()
        states = self._model.follow(embeddings[:, 0], positions + 1)
        return HeadStates(states, states)


class NoAttention:
    """In the place of an `Attention`."""

    def begin(self, batch: BatchMetadata) -> None:
        pass

    def can_capture(self, num_rows: int, q_len: int) -> bool:
        return False

    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("simulated models do not attend")


def simulated_runner(
    config: EngineConfig, device: SimulatedDevice, wrong_every: int = 0, beside: ModelRunner | None = None
) -> ModelRunner:
    """A `ModelRunner` over a simulated model; `beside`: the one whose pages it shares."""
    model_config = ModelConfig(
        family="llama",
        hidden_size=1,
        intermediate_size=1,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=2,
        vocab_size=VOCAB_SIZE,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        max_position_embeddings=config.max_model_len or 1 << 20,
        torch_dtype=torch.float32,
    )
    if beside is None:
        plan = plan_kv_cache(config, model_config, model_config.max_position_embeddings, torch.float32)
        page_table = torch.zeros((config.max_num_seqs, plan.max_pages_per_seq), dtype=torch.int32)
        kv_cache, ops = KvCache(plan, [], page_table), NativeOps(1)
    else:
        kv_cache, ops = beside.kv_cache, cast(NativeOps, beside.ops)
    return ModelRunner(
        config=model_config,
        model=cast("LlamaForCausalLM", SimulatedModel(device, wrong_every)),
        ops=ops,
        kv_cache=kv_cache,
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_model_len=model_config.max_position_embeddings,
        linear_backend="native",
        attention_backend="native",
        cpu_kernels=ops.kernels,
        weight_bytes=0,
    )


def simulated_head(device: SimulatedDevice, wrong_every: int) -> MtpHead:
    return cast("MtpHead", SimulatedHead(SimulatedModel(device, wrong_every), device))


def no_attention() -> Attention:
    return NoAttention()
