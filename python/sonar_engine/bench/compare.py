"""The other side of a comparison: transformers' `generate` with the same weights, dtype and threads."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch

from sonar_engine.errors import ModelLoadError
from sonar_engine.models.model_config import ModelConfig
from sonar_engine.models.registry import resolve_model
from sonar_engine.models.weights import load_weights


class TransformersModel:
    """A causal model loaded by transformers from the same file or folder as ours."""

    def __init__(self, model: str, dtype: torch.dtype) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        resolved = resolve_model(model)
        path = Path(resolved.path)
        source: dict[str, Any] = {"gguf_file": path.name} if resolved.kind == "gguf" else {}
        folder = path.parent if resolved.kind == "gguf" else path
        config = AutoConfig.from_pretrained(folder, local_files_only=True, **source)
        weights = load_weights(path, ModelConfig.load(path), dtype, torch.device("cpu"), None)
        # transformers would keep a GGUF file's weights packed and compute in fp32: another job than ours.
        self._model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        missing, unexpected = self._model.load_state_dict(weights, strict=False, assign=True)
        if unexpected or set(missing) - {"lm_head.weight"}:
            raise ModelLoadError(f"transformers does not take these weights: {[*missing, *unexpected][:3]}")
        self._model.tie_weights()
        self._model.eval()
        self._pad_id = 0
        self._num_threads = len(os.sched_getaffinity(0))  # torch's own team; our engine keeps torch at one thread

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], output_len: int) -> float:
        """Seconds for `output_len` greedy tokens after each prompt, as one batch padded on the left."""
        longest = max(map(len, prompts))
        ids = torch.tensor([[self._pad_id] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        ours = torch.get_num_threads()
        torch.set_num_threads(self._num_threads)
        started = time.perf_counter()
        output = self._model.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=False,
            min_new_tokens=output_len,
            max_new_tokens=output_len,
            pad_token_id=self._pad_id,
        )
        elapsed = time.perf_counter() - started
        torch.set_num_threads(ours)
        if output.shape[1] != longest + output_len:
            raise RuntimeError(f"transformers gave {output.shape[1] - longest} tokens instead of {output_len}")
        return elapsed
