"""The Llama family (Llama, SmolLM, Mistral, Qwen2, Qwen3) over any `Ops` and any `Attention`."""

from __future__ import annotations

import torch

from sonar_engine.attention.base import Attention
from sonar_engine.layers.base import Ops
from sonar_engine.layers.rope import build_cos_sin
from sonar_engine.models.decoder_stack import DecoderStack, build_layer
from sonar_engine.models.model_config import ModelConfig
from sonar_engine.step_buffers import BatchMetadata


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
        self.embedding = weights.pop("model.embed_tokens.weight")  # [V, H]
        self._attention = attention
        layers = [build_layer(weights, f"model.layers.{index}.", ops) for index in range(config.num_layers)]
        final_norm = weights.pop("model.norm.weight")
        head = weights.pop("lm_head.weight", None)
        self.output = ops.linear(self.embedding if head is None else head, None, out_dtype=torch.float32)
        cos_sin = build_cos_sin(config, max_positions or config.max_position_embeddings, device=self.embedding.device)
        self._stack = DecoderStack(config, layers, final_norm, ops, cos_sin)

    @torch.inference_mode()
    def forward(self, token_ids: torch.Tensor, batch: BatchMetadata) -> torch.Tensor:
        """token_ids int32 [T], none below 0 -> the final hidden states after the last norm, [T, H]."""
        return self.forward_with_capture(token_ids, batch, ())[0]

    @torch.inference_mode()
    def forward_with_capture(
        self, token_ids: torch.Tensor, batch: BatchMetadata, capture_layers: tuple[int, ...]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """`forward`, and the residual stream [T, H] entering each layer of `capture_layers`, in layer order."""
        self._attention.begin(batch)
        return self.run(batch.positions, token_ids, capture_layers)

    @torch.inference_mode()
    def run(
        self, positions: torch.Tensor, token_ids: torch.Tensor, capture_layers: tuple[int, ...] = ()
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """`forward_with_capture` over the batch that the attention has begun; positions int32 [T]."""
        entering = self.embedding.index_select(0, token_ids)
        hidden, _, captured = self._stack.run(entering, positions, self._attention.forward, capture_layers)
        return hidden, captured

    @torch.inference_mode()
    def logits(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        """hidden_rows [S, H], post-norm -> fp32 [S, V]."""
        return self.output(hidden_rows)
