"""A draft model while it is trained: some layers and a norm between the target's embedding and output matrix.

Unlike a head it sees tokens alone, so that one causal pass over a text gives what it drafts at every position, in
whatever step of a draft: the tokens before are the text's own, as they are in serving when all of them are accepted.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

from sonar_engine.drafters.mtp_head import register_dotted
from sonar_engine.layers.rope import build_cos_sin
from sonar_engine.layers.torch_ops import TorchOps
from sonar_engine.models.decoder_stack import Attend, DecoderStack, build_layer
from sonar_engine.models.model_config import ModelConfig
from sonar_engine.models.weights import Shape, layer_shapes
from sonar_engine.training.loss import DraftOutcome, OutputRows, draft_loss, has_token, step_weights
from sonar_engine.training.packing import PackedBatch
from sonar_engine.training.student import StudentTrainer

# B rows, L positions, M start slots, K draft steps, H hidden size.


class DraftLayers(nn.Module):
    """What is trained of a draft model, fp32, under the checkpoint's names without `model.`; uninitialised."""

    def __init__(self, config: ModelConfig, max_positions: int) -> None:
        super().__init__()
        self.config = config
        for name, shape in trained_shapes(config).items():
            register_dotted(self, name, nn.Parameter(torch.empty(shape)))
        self.register_buffer("cos_sin", build_cos_sin(config, max_positions), persistent=False)

    def forward(self, embeddings: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """embeddings [T, H] of the tokens at positions int32 [T] -> the final hidden states after the norm, [T, H].

        Computes in the embeddings' dtype, whatever the parameters' own.
        """
        ops = TorchOps()
        weights = {name: value.to(embeddings.dtype) for name, value in self.named_parameters()}
        layers = [build_layer(weights, f"layers.{index}.", ops) for index in range(self.config.num_layers)]
        stack = DecoderStack(self.config, layers, weights["norm.weight"], ops, self.get_buffer("cos_sin"))
        return stack.run(embeddings, positions, attend)[0]


def trained_shapes(config: ModelConfig) -> dict[str, Shape]:
    """The parameters of `DraftLayers`."""
    shapes: dict[str, Shape] = {"norm.weight": (config.hidden_size,)}
    for index in range(config.num_layers):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in layer_shapes(config).items()}
    return shapes


def some_layers(config: ModelConfig, layers: tuple[int, ...]) -> ModelConfig:
    """The configuration of a model that has only `layers`, each with the window that it has in the whole one."""
    windows = tuple(config.layer_windows[layer] for layer in layers)
    return replace(config, num_layers=len(layers), layer_windows=windows, num_nextn_predict_layers=0)


class PackedAttention:
    """The `Attend` of packed texts: causal, each text seeing only itself."""

    def __init__(self, config: ModelConfig, text_starts: torch.Tensor) -> None:
        """`text_starts` int64 [B, L] as in `PackedBatch`."""
        self._windows = config.layer_windows
        self._text_starts = text_starts
        self._masks: dict[int | None, torch.Tensor] = {}  # by window

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q [B * L, Hq, D], k and v [B * L, Hkv, D] -> [B * L, Hq * D]"""
        rows, groups = len(self._text_starts), q.shape[1] // k.shape[1]
        q, k, v = (x.unflatten(0, (rows, -1)).transpose(1, 2) for x in (q, k, v))
        # Repeated here: the fused kernels of a GPU do not take masks together with grouped heads.
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=self._mask(self._windows[layer]))
        return out.transpose(1, 2).flatten(2).flatten(0, 1)

    def _mask(self, window: int | None) -> torch.Tensor:
        """bool [B, 1, L, L], which keys each query sees; padding sees itself."""
        if window not in self._masks:
            at = torch.arange(self._text_starts.shape[1], device=self._text_starts.device)
            first = self._text_starts if window is None else torch.maximum(self._text_starts, at - window + 1)
            self._masks[window] = ((at >= first[..., None]) & (at <= at[:, None]))[:, None]
        return self._masks[window]


def run_packed(layers: DraftLayers, embedding: torch.Tensor, batch: PackedBatch, compute: torch.dtype) -> torch.Tensor:
    """Final hidden states [B, L, H] over the tokens of the batch; `embedding` [V, H] is the target's."""
    positions = torch.arange(batch.tokens.shape[1], device=batch.tokens.device) - batch.text_starts
    attention = PackedAttention(layers.config, batch.text_starts)
    states = layers(embedding[batch.tokens].flatten(0, 1).to(compute), positions.flatten().int(), attention)
    return states.view(*batch.tokens.shape, -1)


class DraftTrainer(StudentTrainer):
    """The loss is that of one draft step, which is the same in every other; outcomes tell of `num_steps`."""

    def __init__(
        self, layers: DraftLayers, embedding: torch.Tensor, output: OutputRows, *, num_steps: int, compute: torch.dtype
    ) -> None:
        """`embedding` [V, H] as served, `output` the target's whole matrix."""
        super().__init__()
        self.layers = layers
        self.constants = embedding, output
        self.num_steps = num_steps
        self.compute = compute

    def forward(self, batch: PackedBatch, num_texts: int) -> tuple[torch.Tensor, DraftOutcome]:
        embedding, output = self.constants
        states = run_packed(self.layers, embedding, batch, self.compute)
        # The draft token of a slot is the one behind the next position, where the token at hand is the target's own.
        at = (batch.slots + 1).clamp(max=states.shape[1] - 1)
        first = states.gather(1, at[..., None].expand(-1, -1, states.shape[-1]))
        loss, outcome = draft_loss(first[None], batch, output, step_weights(batch, 1, 1.0, num_texts))
        return loss, _in_every_step(outcome, batch, self.num_steps)


def _in_every_step(outcome: DraftOutcome, batch: PackedBatch, num_steps: int) -> DraftOutcome:
    """[1, B, M] to [K, B, M]: draft step k of a slot is the first one of the slot k further on in its text."""
    valid = has_token(batch, num_steps)

    def ahead(part: torch.Tensor) -> torch.Tensor:
        moved = torch.cat([part.roll(-step, dims=-1) for step in range(num_steps)])
        return moved.where(valid, part.new_zeros(()))

    return DraftOutcome(
        ahead(outcome.loss), ahead(outcome.overlap), ahead(outcome.drafts), ahead(outcome.targets), valid
    )
