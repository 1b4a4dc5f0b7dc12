"""The matrix's model, prompts, requests and drafters: real SmolLM2-135M, or in the slice its first layers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from sonar_engine.bench.prompts import load_prompts
from sonar_engine.config import EngineConfig
from sonar_engine.engine import Engine, build_engine
from sonar_engine.models.model_config import ModelConfig
from sonar_engine.models.registry import resolve_model
from sonar_engine.models.weights import load_weights
from sonar_engine.types import Completion, SamplingParams
from tiny_heads import make_head
from tiny_models import smollm2_config

MODEL = "smollm2-135m"
K = 4
DRAFTERS = ("ngram", "oracle", "draft: itself", "draft: fewer layers", "mtp k=1", "mtp k=3, few ids")
SUPPLIES = ("roomy", "tight")


@dataclass(frozen=True)
class Size:
    """How much is run. `num_layers` of the target, None: all."""

    dtypes: tuple[str, ...]
    num_layers: int | None
    num_draft_layers: int
    num_prompts: int
    num_tokens: int  # of greedy completions
    num_varied_tokens: int
    most_prompt_tokens: int
    max_model_len: int
    tight_tokens: int  # of the KV cache, for all sequences together


FULL = Size(("float32", "bfloat16"), None, 10, 20, 256, 64, 200, 512, 2048)
SLICE = Size(("float32",), 2, 1, 6, 18, 14, 48, 96, 112)


def varied(num_tokens: int) -> list[SamplingParams]:
    """Every kind of request whose text may not depend on drafts; 16 of them, so that one batch holds them all."""
    fields: list[dict[str, Any]] = [
        {"temperature": 0.0, "frequency_penalty": 0.8},
        {"temperature": 0.0, "stop": ["the", "."]},
        {"temperature": 1.0, "seed": 11},
        {"temperature": 0.0, "presence_penalty": 1.2, "repetition_penalty": 1.3, "min_tokens": num_tokens - 3},
        {"temperature": 0.0, "max_tokens": 7},
        {"temperature": 0.8, "seed": 12, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
        {"temperature": 0.0, "presence_penalty": 1.5},
        {"temperature": 0.0, "repetition_penalty": 1.3},
        {"temperature": 0.0, "stop_token_ids": [28, 30, 198, 253, 260, 284]},
        {"temperature": 0.0, "stop_token_ids": [28, 30, 198, 253, 260, 284], "min_tokens": 11},
        {"temperature": 0.0, "stop": ["e"], "min_tokens": 5},
        {"temperature": 1.0, "seed": -3, "frequency_penalty": 0.5, "min_tokens": 9},
        {"temperature": 1.0, "seed": 14, "logit_bias": {28: 2.0, 30: -100.0}, "banned_token_ids": [198, 260]},
        {"temperature": 0.0, "max_tokens": 13},
        {"temperature": 1.2, "seed": 15, "allowed_token_ids": list(range(100, 400))},
        {"temperature": 0.0, "num_speculative_tokens": 1},
    ]
    return [SamplingParams(**{"max_tokens": num_tokens, "logprobs": 2, **each}) for each in fields]


@dataclass
class Requests:
    """Prompts with parameters, and what the plain engine answers."""

    prompts: list[list[int]]
    params: list[SamplingParams]
    plain: list[Completion] = field(default_factory=list)


class Matrix:
    """Builds each engine once; one at a time is kept."""

    def __init__(self, size: Size, folder: Path) -> None:
        self.size = size
        self._folder = folder
        self._target = MODEL if size.num_layers is None else str(self._cut(size.num_layers))
        self._requests: dict[str, dict[str, Requests]] = {}
        self._engine: tuple[tuple[str, str, str], Engine] | None = None

    def requests(self, dtype: str) -> dict[str, Requests]:
        """`greedy` and `varied`, answered without speculation; some of them once more alone."""
        if dtype not in self._requests:
            self.close()
            engine = self._build(dtype, {}, "roomy")
            made = self._make_requests(engine)
            for each in made.values():
                each.plain = engine.generate(each.prompts, each.params)
            greedy = made["greedy"]
            assert engine.generate(greedy.prompts[:1], greedy.params[0])[0].token_ids == greedy.plain[0].token_ids
            engine.close()
            self._requests[dtype] = made
        return self._requests[dtype]

    def engine(self, dtype: str, drafter: str, supply: str) -> Engine:
        key = (dtype, drafter, supply)
        if self._engine is None or self._engine[0] != key:
            self.close()
            self._engine = key, self._build(dtype, self.speculative(dtype, drafter), supply)
        return self._engine[1]

    def close(self) -> None:
        if self._engine is not None:
            engine = self._engine[1]
            self._engine = None
            engine.check_integrity()
            assert engine.stats().kv_cache_usage == 0
            engine.close()

    def oracle(self, dtype: str, rates: Sequence[float]) -> dict[str, Any]:
        """Replays what the plain engine said."""
        file = self._folder / f"texts_{dtype}.jsonl"
        plain = [completion for each in self.requests(dtype).values() for completion in each.plain]
        lines = [json.dumps({"prompt_token_ids": c.prompt_token_ids, "token_ids": c.token_ids}) for c in plain]
        file.write_text("\n".join(lines), encoding="utf-8")
        return {"method": "oracle", "oracle_texts": str(file), "oracle_rates": list(rates), "num_speculative_tokens": K}

    def build_with(self, dtype: str, speculative: dict[str, Any]) -> Engine:
        """An engine of its own, which the caller closes."""
        self.close()
        return self._build(dtype, speculative, "roomy")

    def speculative(self, dtype: str, drafter: str) -> dict[str, Any]:
        if drafter == "ngram":
            return {"method": "ngram", "num_speculative_tokens": K, "prompt_lookup_min": 1}
        if drafter == "oracle":
            return self.oracle(dtype, (0.9, 0.7, 0.5, 0.3))
        if drafter.startswith("draft"):
            model = self._target if drafter == "draft: itself" else str(self._cut(self.size.num_draft_layers))
            return {"method": "draft_model", "model": model, "num_speculative_tokens": K}
        few = drafter.endswith("few ids")
        return {"method": "mtp", "model": str(self._head(dtype, few)), "num_speculative_tokens": 3 if few else 1}

    def _make_requests(self, engine: Engine) -> dict[str, Requests]:
        size, tokenizer = self.size, engine.tokenizer
        encoded = [
            tokenizer.encode(p) if isinstance(p, str) else tokenizer.apply_chat_template(p) for p in load_prompts()
        ]
        short = [prompt for prompt in encoded if len(prompt) <= size.most_prompt_tokens]
        kinds = varied(size.num_varied_tokens)
        greedy = SamplingParams(temperature=0.0, max_tokens=size.num_tokens, ignore_eos=True, logprobs=2)
        first, second = short[: size.num_prompts], short[size.num_prompts : 2 * size.num_prompts]
        assert len(first) == len(second) == size.num_prompts
        spread = [second[index % len(second)] for index in range(len(kinds))]
        # Each prompt's last token makes it one of its own: the oracle knows texts by prompt.
        own = [[*prompt, 300 + index] for index, prompt in enumerate(spread)]
        return {"greedy": Requests(first, [greedy] * len(first)), "varied": Requests(own, kinds)}

    def _build(self, dtype: str, speculative: dict[str, Any], supply: str) -> Engine:
        """Batch-invariant: where a near tie could go either way, it goes the same way in every batch."""
        size = self.size
        options: dict[str, Any] = {"model": self._target, "tokenizer": MODEL, "dtype": dtype, "device": "cpu"}
        options |= {"batch_invariant": True, "max_num_seqs": 16, "max_num_batched_tokens": 128, "page_size": 8}
        options |= {"max_model_len": size.max_model_len, "speculative": speculative}
        tokens = size.tight_tokens if supply == "tight" else 20 * size.max_model_len
        return build_engine(EngineConfig(**options, kv_cache_tokens=tokens))

    def _cut(self, num_layers: int) -> Path:
        """A copy of the model with its first layers alone."""
        folder = self._folder / f"cut_{num_layers}"
        if not folder.exists():
            path = resolve_model(MODEL).path
            weights = load_weights(path, ModelConfig.load(path), torch.float32)
            kept = {name: tensor for name, tensor in weights.items() if _layer_of(name) < num_layers}
            kept.pop("lm_head.weight", None)  # tied
            folder.mkdir()
            save_file(kept, folder / "model.safetensors", {"format": "pt"})
            config = smollm2_config()
            config.num_hidden_layers = num_layers
            config.architectures = ["LlamaForCausalLM"]
            config.save_pretrained(folder)
        return folder

    def _head(self, dtype: str, few: bool) -> Path:
        """Random weights; with `few` it drafts only the tokens that come up most, so that some are accepted."""
        folder = self._folder / f"head_{dtype}_{few}"
        if not folder.exists():
            token_map = None
            if few:
                tokens = Counter(t for each in self.requests(dtype).values() for c in each.plain for t in c.token_ids)
                token_map = torch.tensor([token for token, _ in tokens.most_common(12)], dtype=torch.int32)
            make_head(resolve_model(self._target).path, folder, token_map=token_map)
        return folder


def _layer_of(name: str) -> int:
    """-1 for what is outside the layers."""
    parts = name.split(".")
    return int(parts[parts.index("layers") + 1]) if "layers" in parts else -1
