"""`sonar generate`: completions of prompts, as text or as JSON Lines."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from sonar_engine.cli.options import config_options, load_drafting_options
from sonar_engine.cli.prompts_file import Prompt, read_prompts
from sonar_engine.cli.session import Session, checked_settings, open_session
from sonar_engine.cli.terminal import note_drafter, progress_bars
from sonar_engine.config import EngineConfig
from sonar_engine.errors import InvalidRequestError
from sonar_engine.response_metrics import response_metrics
from sonar_engine.types import Completion, SamplingParams

SAMPLING = "Sampling"


@config_options(EngineConfig, without=("seed",))
def generate(
    *,
    prompt: Annotated[list[str] | None, typer.Option(help="A text to continue; may be given several times")] = None,
    prompts: Annotated[Path | None, typer.Option(help='JSON Lines: {"prompt"} or {"messages"} a line')] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put each --prompt through the chat template")] = False,
    max_tokens: Annotated[int, typer.Option(help="Most tokens a completion", rich_help_panel=SAMPLING)] = 128,
    min_tokens: Annotated[int | None, typer.Option(help="Fewest tokens", rich_help_panel=SAMPLING)] = None,
    temperature: Annotated[
        float | None,
        typer.Option(help="0: always the most likely token; default: the model's", rich_help_panel=SAMPLING),
    ] = None,
    top_p: Annotated[float | None, typer.Option(help="Nucleus sampling", rich_help_panel=SAMPLING)] = None,
    top_k: Annotated[int | None, typer.Option(help="Only the k most likely tokens", rich_help_panel=SAMPLING)] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Least share of the top probability", rich_help_panel=SAMPLING)
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same text", rich_help_panel=SAMPLING)] = None,
    stop: Annotated[list[str] | None, typer.Option(help="A text that ends it", rich_help_panel=SAMPLING)] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after EOS", rich_help_panel=SAMPLING)] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line")] = False,
    **options: Any,
) -> None:
    """Complete prompts. A --prompt is continued as it stands; messages go through the model's chat template."""
    asked = _asked_prompts(prompt, prompts, chat)
    config = load_drafting_options(options, "fixed" if len(asked) == 1 else "adaptive").engine
    settings = checked_settings(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop=stop,
        ignore_eos=ignore_eos,
    )
    note_drafter(config)
    with open_session(config) as session:
        params = session.sampling(settings)
        if len(asked) == 1 and not as_json:
            _print_stream(session, asked[0], params)
        else:
            _print_all(session, asked, params, as_json)


def _asked_prompts(texts: list[str] | None, file: Path | None, chat: bool) -> list[Prompt]:
    if not texts and file is None:
        raise InvalidRequestError("no prompt; give --prompt TEXT or --prompts FILE.jsonl", param="prompt")
    asked: list[Prompt] = []
    for text in texts or []:
        asked.append([{"role": "user", "content": text}] if chat else text)
    return asked + (read_prompts(file) if file is not None else [])


def _print_stream(session: Session, prompt: Prompt, params: SamplingParams) -> None:
    def write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    session.stream(session.encode(prompt), params, write)
    print()


def _print_all(session: Session, prompts: list[Prompt], params: SamplingParams, as_json: bool) -> None:
    encoded = [session.encode(prompt) for prompt in prompts]
    most = len(prompts) * (params.max_tokens or 0)
    with progress_bars() as progress:

        def on_text(index: int, text: str) -> None:
            progress("Generating", session.engine.stats().generation_tokens, most)

        completions = session.engine.generate(encoded, params, on_text)
    for completion in completions:
        if as_json:
            print(json.dumps(completion_object(completion), ensure_ascii=False))
        else:
            print(f"[{completion.index}]\n{completion.text}\n")


def completion_object(completion: Completion) -> dict[str, Any]:
    """One line of `--json`."""
    num_prompt, num_output = len(completion.prompt_token_ids), len(completion.token_ids)
    return {
        "index": completion.index,
        "text": completion.text,
        "prompt_token_ids": completion.prompt_token_ids,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": completion.metrics.num_cached_tokens},
        },
        "metrics": response_metrics(completion.metrics, num_output),
    }
