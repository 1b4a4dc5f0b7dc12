"""Decoder layers of the Llama family over any `Ops` and any attention, for targets and for draft heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from sonar_engine.layers.base import Linear, Ops
from sonar_engine.models.model_config import ModelConfig

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer, q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, D]) -> [T, Hq * D], as `attention.base.Attention.forward`."""


@dataclass(frozen=True)
class DecoderLayer:
    """Weights of one layer. A norm is None where there is none: `q_norm` and `k_norm` [head_dim], the others [H]."""

    input_norm: torch.Tensor | None
    qkv: Linear  # rows: q heads, k heads, v heads
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: Linear
    post_norm: torch.Tensor | None
    gate_up: Linear
    down: Linear


def build_layer(weights: dict[str, torch.Tensor], prefix: str, ops: Ops) -> DecoderLayer:
    """Takes a layer's tensors (Hugging Face names behind `prefix`) out of `weights`."""

    def linear(*names: str) -> Linear:
        """Rows of the named projections, one below the other."""
        weight = [weights.pop(f"{prefix}{name}.weight") for name in names]
        bias = [weights.pop(f"{prefix}{name}.bias") for name in names if f"{prefix}{name}.bias" in weights]
        return ops.linear(_joined(weight), _joined(bias) if bias else None)

    return DecoderLayer(
        input_norm=weights.pop(f"{prefix}input_layernorm.weight", None),
        qkv=linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        q_norm=weights.pop(f"{prefix}self_attn.q_norm.weight", None),
        k_norm=weights.pop(f"{prefix}self_attn.k_norm.weight", None),
        output=linear("self_attn.o_proj"),
        post_norm=weights.pop(f"{prefix}post_attention_layernorm.weight", None),
        gate_up=linear("mlp.gate_proj", "mlp.up_proj"),
        down=linear("mlp.down_proj"),
    )


class DecoderStack:
    """Layers and the norm behind them. T = tokens of the batch, H = hidden size."""

    def __init__(
        self,
        config: ModelConfig,
        layers: Sequence[DecoderLayer],
        final_norm: torch.Tensor | None,
        ops: Ops,
        cos_sin: torch.Tensor,
    ) -> None:
        """`final_norm` [H] or None: no norm; `cos_sin` as `Ops.rope` reads it."""
        self._layers = layers
        self._final_norm = final_norm
        self._ops = ops
        self._cos_sin = cos_sin
        self._eps = config.rms_norm_eps
        self._head_dim = config.head_dim
        self._q_size = config.num_heads * config.head_dim
        self._kv_size = config.num_kv_heads * config.head_dim

    def run(
        self,
        residual: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        capture_layers: tuple[int, ...] = (),
    ) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """residual [T, H] entering layer 0 (may be written over), positions int32 [T].

        Returns the states behind the last layer, normed and as they are, [T, H] each, and the residual stream [T, H]
        that entered each layer of `capture_layers`, in layer order.
        """
        ops = self._ops
        captured: list[torch.Tensor] = []
        hidden = self._norm(residual, self._layers[0].input_norm)
        for index, layer in enumerate(self._layers):
            if index in capture_layers:
                captured.append(residual.clone())  # ops may write the next sum into `residual`
            hidden = layer.output(self._attend(index, layer, hidden, positions, attend))
            hidden, residual = self._add_norm(hidden, residual, layer.post_norm)
            hidden = layer.down(ops.silu_and_mul(layer.gate_up(hidden)))
            following = self._final_norm if index + 1 == len(self._layers) else self._layers[index + 1].input_norm
            hidden, residual = self._add_norm(hidden, residual, following)
        return hidden, residual, captured

    def _norm(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        return x if weight is None else self._ops.rms_norm(x, weight, self._eps)

    def _add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if weight is None:
            total = x + residual
            return total, total
        return self._ops.add_rms_norm(x, residual, weight, self._eps)

    def _attend(
        self, index: int, layer: DecoderLayer, hidden: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        num_tokens, head_dim = hidden.shape[0], self._head_dim
        qkv = layer.qkv(hidden)
        q = qkv[:, : self._q_size].view(num_tokens, -1, head_dim)
        k = qkv[:, self._q_size : -self._kv_size].view(num_tokens, -1, head_dim)
        v = qkv[:, -self._kv_size :].view(num_tokens, -1, head_dim)
        if layer.q_norm is not None and layer.k_norm is not None:
            q = self._ops.rms_norm(q, layer.q_norm, self._eps)
            k = self._ops.rms_norm(k, layer.k_norm, self._eps)
        self._ops.rope(q, k, positions, self._cos_sin)
        return attend(index, q, k, v)


def _joined(tensors: list[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
