"""Loads a checkpoint into tensors under Hugging Face's names, after checking every name and shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Protocol, Self

import torch

from sonar_engine.errors import ModelLoadError
from sonar_engine.models.model_config import ModelConfig

Progress = Callable[[int, int], None]  # (elements loaded, elements in all)
Shape = tuple[int, ...]

HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
_NAMED_AT_MOST = 5  # names spelled out in one error


class Checkpoint(Protocol):
    """An open checkpoint: shapes are known, data is read on demand."""

    @property
    def shapes(self) -> Mapping[str, Shape]: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc_info: object) -> None: ...

    def read(self, name: str) -> Iterator[tuple[int, torch.Tensor]]:
        """Blocks of a tensor along its first dimension: (first index, values in any float dtype)."""
        ...


def expected_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Every tensor a model of this configuration has; a tied head is not among them."""
    hidden = config.hidden_size
    shapes: dict[str, Shape] = {EMBEDDING: (config.vocab_size, hidden), "model.norm.weight": (hidden,)}
    if not config.tie_word_embeddings:
        shapes[HEAD] = (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in layer_shapes(config).items()}
    return shapes


def layer_shapes(config: ModelConfig) -> dict[str, Shape]:
    """The tensors of one layer, by their names within it."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, Shape] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q_size, hidden),
        "self_attn.k_proj.weight": (kv_size, hidden),
        "self_attn.v_proj.weight": (kv_size, hidden),
        "self_attn.o_proj.weight": (hidden, q_size),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    biases = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size} if config.qkv_bias else {}
    biases |= {"o_proj": hidden} if config.o_bias else {}
    shapes |= {f"self_attn.{name}.bias": (size,) for name, size in biases.items()}
    if config.mlp_bias:
        shapes |= {f"mlp.{n}.bias": (s,) for n, s in (("gate_proj", inner), ("up_proj", inner), ("down_proj", hidden))}
    if config.qk_norm:
        shapes |= {f"self_attn.{name}.weight": (config.head_dim,) for name in ("q_norm", "k_norm")}
    return shapes


def load_weights(
    model_path: str | Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> dict[str, torch.Tensor]:
    """All tensors of a folder of safetensors or a .gguf file, as contiguous `dtype` tensors on `device`.

    A tied head has no entry of its own. Raises ModelLoadError for a damaged file and, in one message, for missing,
    unknown and misshapen tensors. Beside the result at most one tensor's block is held.
    """
    with open_checkpoint(Path(model_path), config) as checkpoint:
        expected = expected_shapes(config)
        optional = {HEAD: expected[EMBEDDING]} if config.tie_word_embeddings else {}
        found = {name: shape for name, shape in checkpoint.shapes.items() if not _is_of_draft_heads(name, config)}
        check_tensors(expected, optional, found, f"{model_path}: tensors do not fit this {config.family} configuration")
        total = sum(torch.Size(shape).numel() for shape in expected.values())
        weights: dict[str, torch.Tensor] = {}
        done = 0
        for name, shape in expected.items():
            weights[name] = torch.empty(shape, dtype=dtype, device=device)
            for first, block in checkpoint.read(name):
                weights[name][first : first + block.shape[0]].copy_(block)
            done += weights[name].numel()
            if progress is not None:
                progress(done, total)
        if config.tie_word_embeddings and HEAD in checkpoint.shapes:
            _check_tied(checkpoint, weights[EMBEDDING], str(model_path))
    return weights


def load_output_rows(
    model_path: str | Path, config: ModelConfig, ids: torch.Tensor, dtype: torch.dtype, device: torch.device | str
) -> torch.Tensor:
    """The rows `ids` int64 [N], on the CPU, of the output matrix (the embedding where it is tied), [N, H]."""
    with open_checkpoint(Path(model_path), config) as checkpoint:
        return _rows(checkpoint, EMBEDDING if config.tie_word_embeddings else HEAD, ids, dtype, device)


def load_embedding(
    model_path: str | Path, config: ModelConfig, dtype: torch.dtype, device: torch.device | str
) -> torch.Tensor:
    """The embedding alone, [V, H]."""
    with open_checkpoint(Path(model_path), config) as checkpoint:
        return _rows(checkpoint, EMBEDDING, torch.arange(config.vocab_size), dtype, device)


def _rows(
    checkpoint: Checkpoint, name: str, ids: torch.Tensor, dtype: torch.dtype, device: torch.device | str
) -> torch.Tensor:
    rows = torch.empty((len(ids), *checkpoint.shapes[name][1:]), dtype=dtype, device=device)
    wanted, places = ids.sort()
    for first, block in checkpoint.read(name):
        begin, end = torch.searchsorted(wanted, torch.tensor([first, first + block.shape[0]])).tolist()
        if begin < end:
            rows[places[begin:end].to(device)] = block[wanted[begin:end] - first].to(device, dtype)
    return rows


def open_checkpoint(path: Path, config: ModelConfig) -> Checkpoint:
    """A folder of safetensors or a .gguf file; close it, or use it as a context."""
    if path.suffix == ".gguf":
        from sonar_engine.models.gguf_weights import GgufCheckpoint

        return GgufCheckpoint(path, config)
    from sonar_engine.models.safetensors_weights import SafetensorsCheckpoint

    return SafetensorsCheckpoint(path)


def read_whole(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    """A tensor in one piece, in the file's dtype."""
    return torch.cat([block for _, block in checkpoint.read(name)])


def draft_head_prefix(config: ModelConfig, index: int) -> str:
    """What the tensors of draft head `index` (from 0) are called before their own names."""
    return f"model.layers.{config.num_layers + index}."


def _is_of_draft_heads(name: str, config: ModelConfig) -> bool:
    heads = tuple(draft_head_prefix(config, index) for index in range(config.num_nextn_predict_layers))
    return name.startswith(heads)


def check_tensors(
    expected: Mapping[str, Shape], optional: Mapping[str, Shape], found: Mapping[str, Shape], complaint: str
) -> None:
    """Raises ModelLoadError that begins with `complaint` and names missing, unknown and misshapen tensors."""
    allowed = {**expected, **optional}
    missing = [name for name in expected if name not in found]
    unknown = [name for name in found if name not in allowed]
    misshapen = [
        f"{name} is {list(found[name])}, expected {list(shape)}"
        for name, shape in allowed.items()
        if name in found and tuple(found[name]) != shape
    ]
    complaints = [
        f"{len(names)} {kind}: {_some(names)}"
        for kind, names in (("missing", missing), ("unknown", unknown), ("misshapen", misshapen))
        if names
    ]
    if complaints:
        raise ModelLoadError(f"{complaint}: {'; '.join(complaints)}")


def _some(names: list[str]) -> str:
    rest = len(names) - _NAMED_AT_MOST
    return ", ".join(names[:_NAMED_AT_MOST]) + (f" and {rest} more" if rest > 0 else "")


def _check_tied(checkpoint: Checkpoint, embedding: torch.Tensor, where: str) -> None:
    for first, block in checkpoint.read(HEAD):
        mine = embedding[first : first + block.shape[0]]
        if not torch.equal(block.to(mine), mine):
            raise ModelLoadError(
                f"{where}: tie_word_embeddings is set, yet {HEAD} differs from {EMBEDDING}; "
                "set tie_word_embeddings to false or remove the tensor"
            )
