"""`sonar train eval`: what a head or draft model is worth. Acceptance and speed come from the engine that drafts with
it; loss, overlap and simulated acceptance from the trainer's forward pass over the same texts, with states that the
engine captured.

Simulated and measured acceptance must agree: that is the check that what was trained is what serves.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from sonar_engine.config import SpeculativeConfig
from sonar_engine.drafters.capture import capturing
from sonar_engine.drafters.mtp_checkpoint import load_head, read_head_config
from sonar_engine.engine import Progress, build_engine
from sonar_engine.errors import DivergedError
from sonar_engine.files import write_json
from sonar_engine.models.model_config import ModelConfig
from sonar_engine.models.registry import resolve_model
from sonar_engine.tokenizer import load_tokenizer
from sonar_engine.training.capture import StateCollector, capture_states
from sonar_engine.training.config import EvalConfig
from sonar_engine.training.draft_start import check_draft_target, layers_of_draft
from sonar_engine.training.draft_trainer import DraftTrainer
from sonar_engine.training.head_start import check_head_target
from sonar_engine.training.identity import TargetIdentity, is_draft
from sonar_engine.training.measure import Measured, measure_acceptance, measure_speed
from sonar_engine.training.packing import pack_rows
from sonar_engine.training.plots import plot_report
from sonar_engine.training.prompts import ChatPrompt, read_prompt_files
from sonar_engine.training.ranks import Ranks
from sonar_engine.training.student import StudentTrainer
from sonar_engine.training.texts import Text
from sonar_engine.training.trainer import HeadTrainer, load_constants
from sonar_engine.training.validation import Validation, validate
from sonar_engine.training.walk import Walked
from sonar_engine.types import SamplingParams

REPORT = "report.json"
ALL = "all"


def evaluate_drafter(config: EvalConfig, progress: Progress, say: Callable[[str], None]) -> dict[str, Any]:
    """Writes report.json and plots to `config.out`; `say` is told the table. Raises a SonarError."""
    resolved = resolve_model(config.model)
    target = TargetIdentity.of(resolved, load_tokenizer(resolved))
    drafts = is_draft(config.head)
    (check_draft_target if drafts else check_head_target)(config.head, target)
    speculative = config.speculative("draft_model" if drafts else "mtp")
    prompts = _chosen(read_prompt_files(config.prompts), config.per_task)
    report: dict[str, Any] = {
        "head": str(config.head),
        "target": target.to_dict(),
        "num_speculative_tokens": config.num_speculative_tokens,
        "prompt_lookup": config.prompt_lookup,
        "prompts": len(prompts),
        "temperatures": [],
    }
    for temperature in config.temperature:
        measured = _measure(config, speculative, prompts, temperature, progress)
        validation = _simulate(config, target, measured, progress)
        if not math.isfinite(validation.loss):
            raise DivergedError(
                f"{config.head} gives a loss that is no number ({validation.loss}); its weights or the target's are "
                "damaged, or its training diverged: take another head, or fit again with a lower learning_rate"
            )
        entry = _entry(temperature, measured, validation, walks=temperature == 0 and not config.prompt_lookup)
        report["temperatures"].append(entry)
        for line in table(entry):
            say(line)
    if config.timed_prompts:
        report["speed"] = _speed(config, speculative, prompts, progress)
        speed = report["speed"]
        say(f"one stream: {speed['plain']:.1f} tokens/s without, {speed['drafting']:.1f} with drafts")
    write_json(config.out / REPORT, report)
    plot_report(report, config.head.parent, config.out)
    return report


def _chosen(prompts: list[ChatPrompt], per_task: int | None) -> list[ChatPrompt]:
    kept: dict[str, list[ChatPrompt]] = {}
    for prompt in prompts:
        kept.setdefault(prompt.task, []).append(prompt)
    return [prompt for group in kept.values() for prompt in group[:per_task]]


def _measure(
    config: EvalConfig,
    speculative: SpeculativeConfig,
    prompts: list[ChatPrompt],
    temperature: float,
    progress: Progress,
) -> list[Measured]:
    engine = build_engine(config.engine_config(speculative=speculative, seed=config.seed), progress)
    try:
        params = SamplingParams(temperature=temperature, max_tokens=config.max_answer_tokens)
        return measure_acceptance(engine, prompts, params, progress)
    finally:
        engine.close()


@dataclass(frozen=True)
class _InMemory:
    """`packing.TextStates` of answers just given."""

    target: TargetIdentity
    dtype: torch.dtype
    texts: list[Text]
    states: list[torch.Tensor]

    @property
    def prompt_lens(self) -> list[int]:
        return [text.prompt_len for text in self.texts]

    def __len__(self) -> int:
        return len(self.texts)

    def length(self, index: int) -> int:
        return len(self.texts[index].tokens)

    def tokens(self, index: int) -> torch.Tensor:
        return torch.from_numpy(self.texts[index].tokens)

    def hidden(self, index: int) -> torch.Tensor:
        return self.states[index]


def _simulate(config: EvalConfig, target: TargetIdentity, measured: list[Measured], progress: Progress) -> Validation:
    """The trainer's forward pass, in fp32, over the measured texts, the whole vocabulary counted in `overlap`."""
    texts = [_draftable(each) for each in measured]
    collector = StateCollector()
    engine = build_engine(config.engine_config(enable_prefix_caching=False), progress, capturing(collector.add))
    try:
        states = []
        for state in capture_states(engine, collector, iter(texts)):
            states.append(state)
            progress("Capturing", len(states), len(texts))
        dtype = getattr(torch, engine.info.dtype)
    finally:
        engine.close()
    source = _InMemory(target, dtype, texts, states)
    longest = max(len(text.tokens) for text in texts)
    rows = pack_rows([len(text.tokens) for text in texts], range(len(texts)), longest)
    return validate(_trainer(config, target, dtype, longest), source, rows, longest, Ranks(0, 1, torch.device("cpu")))


def _draftable(measured: Measured) -> Text:
    """The engine never drafts the last token of a budget, since the pass that verifies gives one of its own."""
    text = measured.text
    return replace(text, tokens=text.tokens[:-1]) if measured.was_cut else text


def _trainer(config: EvalConfig, identity: TargetIdentity, dtype: torch.dtype, longest: int) -> StudentTrainer:
    path, steps = resolve_model(config.model).path, config.num_speculative_tokens
    target = ModelConfig.load(path)
    constants: dict[str, Any] = {"served": dtype, "compute": torch.float32, "device": torch.device("cpu")}
    if is_draft(config.head):
        layers = layers_of_draft(config.head, identity, longest)
        embedding, output = load_constants(path, target, None, **constants)
        return DraftTrainer(layers, embedding, output, num_steps=steps, compute=torch.float32)
    files = read_head_config(config.head)
    loaded = load_head(files, path, target, max_positions=longest + steps, dtype=torch.float32)
    token_map = None if loaded.token_map is None else loaded.token_map.long()
    embedding, output = load_constants(path, target, token_map, **constants, whole=True)
    return HeadTrainer(loaded.head, embedding, output, num_steps=steps, step_decay=1.0)


def _entry(temperature: float, measured: list[Measured], validation: Validation, *, walks: bool) -> dict[str, Any]:
    """`walks`: the validation's walk over the texts stands for what was measured."""
    tasks: dict[str, list[Measured]] = {}
    for each in measured:
        tasks.setdefault(each.task, []).append(each)
    by_task = {task: _figures(group) for task, group in tasks.items()}
    return {
        "temperature": temperature,
        "tasks": {**by_task, ALL: _figures(measured)},
        "loss": validation.loss,
        "alpha": validation.overlap,
        "simulated": validation.walked.acceptance_length if walks else None,
        "simulated_conditional": validation.walked.conditional.tolist() if walks else None,
    }


def _figures(group: list[Measured]) -> dict[str, Any]:
    walked = Walked.none(len(group[0].walked.accepted) - 1)
    for each in group:
        walked.add(each.walked)
    return {
        "prompts": len(group),
        "tokens": sum(each.text.num_answer_tokens for each in group),
        "acceptance_length": walked.acceptance_length,
        "conditional": walked.conditional.tolist(),
        "reached": walked.reached.tolist(),
    }


def table(entry: dict[str, Any]) -> list[str]:
    """Acceptance by task at one temperature, for people."""
    depth = len(entry["alpha"])
    positions = "".join(f"{f'pos {position}':>8}" for position in range(1, depth + 1))
    lines = [f"temperature {entry['temperature']:g}", f"{'task':24}{'prompts':>8}{'length':>8}{positions}"]
    for task, figures in entry["tasks"].items():
        cells = "".join(f"{share:8.3f}" for share in figures["conditional"])
        lines.append(f"{task[:23]:24}{figures['prompts']:8}{figures['acceptance_length']:8.2f}{cells}")
    alpha = ", ".join(f"{value:.3f}" for value in entry["alpha"])
    simulated = "" if entry["simulated"] is None else f"; simulated length {entry['simulated']:.3f}"
    return [*lines, f"loss {entry['loss']:.3f} nats; alpha {alpha}{simulated}"]


def _speed(
    config: EvalConfig, speculative: SpeculativeConfig, prompts: list[ChatPrompt], progress: Progress
) -> dict[str, Any]:
    plain = build_engine(config.engine_config(), progress)
    try:
        drafting = build_engine(config.engine_config(speculative=speculative), progress)
        try:
            spread = prompts[:: max(1, len(prompts) // config.timed_prompts)][: config.timed_prompts]
            return asdict(measure_speed(drafting, plain, spread, config.max_answer_tokens))
        finally:
            drafting.close()
    finally:
        plain.close()
