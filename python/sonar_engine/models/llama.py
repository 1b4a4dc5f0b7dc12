"""The Llama family (Llama, SmolLM, Mistral, Qwen2, Qwen3) over any `Ops` and any `Attention`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sonar_engine.attention.base import Attention
from sonar_engine.layers.base import Linear, Ops
from sonar_engine.layers.rope import build_cos_sin
from sonar_engine.models.model_config import ModelConfig
from sonar_engine.step_buffers import BatchMetadata


@dataclass(frozen=True)
class DecoderLayer:
    """Weights of one layer. `q_norm` and `k_norm` [head_dim] are None where the family has none."""

    input_norm: torch.Tensor
    qkv: Linear  # rows: q heads, k heads, v heads
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: Linear
    post_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class LlamaForCausalLM:
    """A decoder-only model. T = tokens of the batch, H = hidden size, V = vocabulary, S = sampled rows.

    Takes its tensors out of `weights` (Hugging Face names), so that fusing them does not hold two copies.
    `max_positions` bounds the positions that a batch may hold (default: the model's own limit).
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: dict[str, torch.Tensor],
        ops: Ops,
        attention: Attention,
        max_positions: int | None = None,
    ) -> None:
        self.config = config
        self._ops = ops
        self._attention = attention
        self._eps = config.rms_norm_eps
        self._q_size = config.num_heads * config.head_dim
        self._kv_size = config.num_kv_heads * config.head_dim
        self._embedding = weights.pop("model.embed_tokens.weight")  # [V, H]
        self._layers = [_build_layer(weights, index, config, ops) for index in range(config.num_layers)]
        self._final_norm = weights.pop("model.norm.weight")
        head = weights.pop("lm_head.weight", None)
        self._head = ops.linear(self._embedding if head is None else head, None, out_dtype=torch.float32)
        self._cos_sin = build_cos_sin(
            config, max_positions or config.max_position_embeddings, device=self._embedding.device
        )

    @torch.inference_mode()
    def forward(self, token_ids: torch.Tensor, batch: BatchMetadata) -> torch.Tensor:
        """token_ids int32 [T], none below 0 -> the final hidden states after the last norm, [T, H]."""
        return self._run(token_ids, batch, (), [])

    @torch.inference_mode()
    def forward_with_capture(
        self, token_ids: torch.Tensor, batch: BatchMetadata, capture_layers: tuple[int, ...]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """`forward`, and the residual stream [T, H] entering each layer of `capture_layers`, in layer order."""
        captured: list[torch.Tensor] = []
        hidden = self._run(token_ids, batch, capture_layers, captured)
        return hidden, captured

    @torch.inference_mode()
    def logits(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        """hidden_rows [S, H], post-norm -> fp32 [S, V]."""
        return self._head(hidden_rows)

    def _run(
        self,
        token_ids: torch.Tensor,
        batch: BatchMetadata,
        capture_layers: tuple[int, ...],
        captured: list[torch.Tensor],
    ) -> torch.Tensor:
        ops = self._ops
        self._attention.begin(batch)
        residual = self._embedding.index_select(0, token_ids)
        hidden = ops.rms_norm(residual, self._layers[0].input_norm, self._eps)
        for index, layer in enumerate(self._layers):
            if index in capture_layers:
                captured.append(residual.clone())  # ops may write the next sum into `residual`
            hidden = layer.output(self._attend(index, layer, hidden, batch.positions))
            hidden, residual = ops.add_rms_norm(hidden, residual, layer.post_norm, self._eps)
            hidden = layer.down(ops.silu_and_mul(layer.gate_up(hidden)))
            following = self._final_norm if index + 1 == len(self._layers) else self._layers[index + 1].input_norm
            hidden, residual = ops.add_rms_norm(hidden, residual, following, self._eps)
        return hidden

    def _attend(self, index: int, layer: DecoderLayer, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        num_tokens, head_dim = hidden.shape[0], self.config.head_dim
        qkv = layer.qkv(hidden)
        q = qkv[:, : self._q_size].view(num_tokens, -1, head_dim)
        k = qkv[:, self._q_size : -self._kv_size].view(num_tokens, -1, head_dim)
        v = qkv[:, -self._kv_size :].view(num_tokens, -1, head_dim)
        if layer.q_norm is not None and layer.k_norm is not None:
            q = self._ops.rms_norm(q, layer.q_norm, self._eps)
            k = self._ops.rms_norm(k, layer.k_norm, self._eps)
        self._ops.rope(q, k, positions, self._cos_sin)
        return self._attention.forward(index, q, k, v)


def _build_layer(weights: dict[str, torch.Tensor], index: int, config: ModelConfig, ops: Ops) -> DecoderLayer:
    prefix = f"model.layers.{index}."

    def linear(*names: str) -> Linear:
        """Rows of the named projections, one below the other."""
        weight = [weights.pop(f"{prefix}{name}.weight") for name in names]
        bias = [weights.pop(f"{prefix}{name}.bias") for name in names if f"{prefix}{name}.bias" in weights]
        return ops.linear(_joined(weight), _joined(bias) if bias else None)

    return DecoderLayer(
        input_norm=weights.pop(f"{prefix}input_layernorm.weight"),
        qkv=linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        q_norm=weights.pop(f"{prefix}self_attn.q_norm.weight", None),
        k_norm=weights.pop(f"{prefix}self_attn.k_norm.weight", None),
        output=linear("self_attn.o_proj"),
        post_norm=weights.pop(f"{prefix}post_attention_layernorm.weight"),
        gate_up=linear("mlp.gate_proj", "mlp.up_proj"),
        down=linear("mlp.down_proj"),
    )


def _joined(tensors: list[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
