"""The MTP head: predicts the token after next from a token and the target's hidden state before it.

    x = W_eh [N_e(e) ; N_h(h)]          e: embedding of the next token, h: the target's final hidden state (post-norm)
    a = x + Attn(N_in(x));  y = a + MLP(N_post(a));  f = N_f(y);  logits = W f

As in DeepSeek-V3 (arXiv 2412.19437), whose code, unlike its report, puts the embedding first; every norm can be
switched off. A further token of the same draft takes f (or y, by configuration) for h. Embedding and W are the
target's. The same module is trained and served.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from sonar_engine.drafters.mtp_config import MtpConfig
from sonar_engine.errors import ConfigError
from sonar_engine.layers.base import Linear, Ops
from sonar_engine.layers.rope import build_cos_sin
from sonar_engine.layers.torch_ops import TorchOps
from sonar_engine.models.decoder_stack import Attend, DecoderStack, build_layer

_INITIAL_STD = 0.02


class HeadStates(NamedTuple):
    """What a pass gives, [T, H] each."""

    for_logits: torch.Tensor  # the output matrix turns them into logits
    features: torch.Tensor  # in place of the target's hidden states in the next pass of a draft


class _Parts(NamedTuple):
    """The parameters as operations. A norm [H] is None where there is none."""

    embedding_norm: torch.Tensor | None
    feature_norm: torch.Tensor | None
    fusion: Linear
    stack: DecoderStack
    ops: Ops


class MtpHead(nn.Module):
    """Parameters under the names of `MtpConfig.shapes`, uninitialised until loaded or `reset_parameters`.

    T = tokens of a batch, H = hidden size. `max_positions` bounds the positions (default: the block's own limit).
    """

    def __init__(
        self,
        config: MtpConfig,
        *,
        max_positions: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.config = config
        for name, shape in config.shapes().items():
            register_dotted(self, name, nn.Parameter(torch.empty(shape, dtype=dtype, device=device)))
        num_positions = max_positions or config.block.max_position_embeddings
        self.register_buffer("cos_sin", build_cos_sin(config.block, num_positions, device), persistent=False)
        self._packed: _Parts | None = None

    def reset_parameters(self, seed: int = 0) -> None:
        """Norms at one, biases at zero, matrices from a normal distribution."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.dim() == 1:
                    parameter.fill_(0.0 if name.endswith(".bias") else 1.0)
                else:
                    parameter.copy_(_INITIAL_STD * torch.randn(parameter.shape, generator=generator))

    def pack(self, ops: Ops) -> None:
        """For serving: the parameters go into `ops`, which may keep them in another form. Trained no more."""
        self._packed = self._assemble(ops, {name: value.detach() for name, value in self.named_parameters()})
        for module in self.modules():
            module._parameters.clear()

    @property
    def is_packed(self) -> bool:
        return self._packed is not None

    @property
    def feeds_back_normed(self) -> bool:
        """Whether a pass's features are what it has for the logits."""
        return self.config.next_feature == "normed"

    def forward(
        self, embeddings: torch.Tensor, features: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> HeadStates:
        """One pass over T tokens: embeddings [T, H] of the tokens at positions + 1, features [T, H] of those at
        positions int32 [T]. `attend` writes each layer's keys and values, wherever they are kept, and attends.

        Unless packed, it computes in the embeddings' dtype, whatever the parameters' own, and can be differentiated.
        """
        parts = self._packed
        if parts is None:
            weights = {name: value.to(embeddings.dtype) for name, value in self.named_parameters()}
            parts = self._assemble(TorchOps(), weights)
        if parts.embedding_norm is not None:
            embeddings = parts.ops.rms_norm(embeddings, parts.embedding_norm, self.config.block.rms_norm_eps)
        if parts.feature_norm is not None:
            features = parts.ops.rms_norm(features, parts.feature_norm, self.config.block.rms_norm_eps)
        fused = parts.fusion(torch.cat((embeddings, features), dim=-1))
        normed, raw, _ = parts.stack.run(fused, positions, attend)
        return HeadStates(normed, normed if self.feeds_back_normed else raw)

    def _assemble(self, ops: Ops, weights: dict[str, torch.Tensor]) -> _Parts:
        block = self.config.block
        layers = [build_layer(weights, f"layers.{index}.", ops) for index in range(block.num_layers)]
        return _Parts(
            embedding_norm=weights.get("enorm.weight"),
            feature_norm=weights.get("hnorm.weight"),
            fusion=ops.linear(weights["eh_proj.weight"], weights.get("eh_proj.bias")),
            stack=DecoderStack(block, layers, weights.get("norm.weight"), ops, self.get_buffer("cos_sin")),
            ops=ops,
        )

    def parameters_for_saving(self) -> dict[str, torch.Tensor]:
        """By name, on the CPU, contiguous. Raises ConfigError once packed."""
        if self.is_packed:
            raise ConfigError("a head that was packed for serving cannot be saved; load it again")
        return {name: value.detach().cpu().contiguous() for name, value in self.named_parameters()}


def register_dotted(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Registers a parameter under a dotted name, in submodules made on the way."""
    *path, leaf = name.split(".")
    for part in path:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    module.register_parameter(leaf, parameter)
