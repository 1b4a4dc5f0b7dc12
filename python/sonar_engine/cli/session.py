"""An engine in this process, with its model's chat template and sampling defaults, for the local commands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from sonar_engine.cli.terminal import progress_bars
from sonar_engine.config import EngineConfig
from sonar_engine.sampling.validation import validate_for_any_model
from sonar_engine.types import Completion, SamplingParams

if TYPE_CHECKING:
    from sonar_engine.engine import Engine

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Session:
    """A started engine, and requests as its model wants them."""

    engine: Engine

    def sampling(self, settings: dict[str, Any]) -> SamplingParams:
        """Sampling parameters: the settings, then the model's defaults."""
        return SamplingParams(**{**self.engine.info.generation_defaults, **settings})

    def encode(self, prompt: str | Messages) -> list[int]:
        """A text as it stands, or messages through the model's chat template."""
        tokenizer = self.engine.tokenizer
        return tokenizer.encode(prompt) if isinstance(prompt, str) else tokenizer.apply_chat_template(prompt)

    def stream(self, prompt: list[int], params: SamplingParams, write: Callable[[str], None]) -> Completion:
        """One completion, whose text is written as it comes."""
        return self.engine.generate([prompt], params, lambda index, text: write(text))[0]


def checked_settings(**given: Any) -> dict[str, Any]:
    """The sampling settings that are given (not None).

    Raises InvalidRequestError for one that no model can follow, so that it is refused before a model is loaded.
    """
    settings = {name: value for name, value in given.items() if value is not None}
    validate_for_any_model(SamplingParams(**settings))
    return settings


def check_config(config: EngineConfig) -> None:
    """Raises what `open_session` would raise before it reads any weight: ConfigError or ModelLoadError."""
    from sonar_engine.drafters.registry import drafter_method
    from sonar_engine.engine import find_models
    from sonar_engine.model_runner import choose_kv_cache
    from sonar_engine.models.model_config import ModelConfig

    resolved, _, drafter_bytes = find_models(config, drafter_method(config))
    choose_kv_cache(config, ModelConfig.load(resolved.path), drafter_bytes)


@contextmanager
def open_session(config: EngineConfig, lines_without_terminal: bool = False) -> Iterator[Session]:
    """Load the model, with progress bars, and close the engine at the end."""
    from sonar_engine.engine import build_engine
    from sonar_engine.models.model_config import ModelConfig
    from sonar_engine.models.registry import resolve_model

    with progress_bars(lines_without_terminal) as progress:
        resolved = resolve_model(config.model, partial(progress, f"Fetching {config.model}"))
        ModelConfig.load(resolved.path)  # a model that cannot be served is named before its tokenizer is looked for
        engine = build_engine(config, progress)
    try:
        yield Session(engine)
    finally:
        engine.close()
