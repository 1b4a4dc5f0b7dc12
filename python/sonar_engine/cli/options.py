"""Command-line options made from the configuration classes, so that each option is defined once."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from sonar_engine.config import EngineConfig, SpeculativeConfig
from sonar_engine.config_loader import LoadedConfig, load_config, option_names, process_environment
from sonar_engine.server.config import ServerConfig

if TYPE_CHECKING:
    from sonar_engine.drafters.shipped import DraftLength

Command = TypeVar("Command", bound=Callable[..., Any])

METAVARS: dict[Any, str] = {int: "INT", float: "NUMBER", str: "TEXT", bool: "", Path: "FILE"}
PANELS: dict[type[BaseModel], str] = {EngineConfig: "Engine", ServerConfig: "Server"}
SPECULATION = "Speculation"


def config_options(
    *models: type[BaseModel], without: tuple[str, ...] = (), default_method: str = "as shipped for the model, else none"
) -> Callable[[Command], Command]:
    """Adds an option for every field of `models` (but `without`) and for speculation to a command.

    `default_method` is what its help says of drafting that is not asked for. The command's `**options` receives them by
    option name, None where the user gave none.
    """

    def decorate(command: Command) -> Command:
        signature = inspect.signature(command, eval_str=True)
        own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        added = [_parameter("config", Path | None, _config_option())]
        for model in models:
            added += [_field_parameter(model, option, field) for option, field in option_names(model).items()]
        added += _speculation_parameters(default_method)
        taken = {*without, *(p.name for p in own)}
        parameters = own + [p for p in added if p.name not in taken]
        command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        return command

    return decorate


def stage_options(model: type[BaseModel]) -> Callable[[Command], Command]:
    """Adds an option for every field of `model` to a command, whose `**options` receives them, None where not given."""

    def decorate(command: Command) -> Command:
        signature = inspect.signature(command, eval_str=True)
        own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        added = [_field_parameter(model, option, field) for option, field in option_names(model).items()]
        command.__signature__ = signature.replace(parameters=own + added)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in own + added}
        return command

    return decorate


def given_options(options: dict[str, Any]) -> dict[str, Any]:
    """Those that the user gave."""
    return {name: value for name, value in options.items() if value not in (None, [], ())}


def load_options(options: dict[str, Any], **given: Any) -> LoadedConfig:
    """The configuration a command's `options` ask for, over environment and file."""
    file = options.pop("config", None)
    return load_config({**options, **given}, process_environment(), file)


def load_drafting_options(options: dict[str, Any], draft_length: DraftLength, **given: Any) -> LoadedConfig:
    """As `load_options`, with the drafter that comes for the model, unless the user says how to draft."""
    loaded = load_options(options, **given)
    from sonar_engine.drafters.shipped import with_shipped_drafter

    return loaded._replace(engine=with_shipped_drafter(loaded.engine, draft_length))


def _parameter(name: str, annotation: Any, option: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[annotation, option]
    )


def _config_option() -> Any:
    return typer.Option("--config", metavar="FILE", help="YAML file of options", show_default=False)


def _field_parameter(model: type[BaseModel], option: str, field: str) -> inspect.Parameter:
    info = model.model_fields[field]
    kind = _plain_type(info.annotation)
    flag = f"--{option.replace('_', '-')}"
    common: dict[str, Any] = {"help": _help(info), "rich_help_panel": PANELS.get(model), "show_default": False}
    if kind is bool:
        return _parameter(option, bool | None, typer.Option(f"{flag}/--no-{flag[2:]}", **common))
    if get_origin(kind) in (list, tuple, set, frozenset):
        return _parameter(option, list[str] | None, typer.Option(flag, metavar="TEXT", **common))
    metavar = "|".join(get_args(kind)) if get_origin(kind) is Literal else METAVARS.get(kind, "TEXT")
    return _parameter(option, str | None, typer.Option(flag, metavar=metavar, **common))


def _plain_type(annotation: Any) -> Any:
    """The type behind `X | None`."""
    if get_origin(annotation) in (Union, UnionType):
        kinds = [kind for kind in get_args(annotation) if kind is not NoneType]
        return kinds[0] if len(kinds) == 1 else str
    return annotation


def _help(info: FieldInfo) -> str:
    text = info.description or ""
    default = info.get_default(call_default_factory=True) if not info.is_required() else None
    if default is None or default in ("", (), []) or "default:" in text:
        return text
    shown = {True: "on", False: "off"}[default] if isinstance(default, bool) else default
    return f"{text} \\[default: {shown}]".strip()


def _speculation_parameters(default_method: str) -> list[inspect.Parameter]:
    methods = get_args(SpeculativeConfig.model_fields["method"].annotation)
    specs = {
        "speculative_config": ("JSON", 'Drafting as one object, such as {"method": "ngram"}'),
        "spec_method": ("|".join(methods), f"How tokens are proposed \\[default: {default_method}]"),
        "spec_model": ("PATH", "The drafter's model, for methods that have one; shipped: what comes for the model"),
        "num_speculative_tokens": ("INT", "Most drafts a step \\[default: 4]"),
    }
    return [
        _parameter(
            name,
            str | None,
            typer.Option(
                f"--{name.replace('_', '-')}",
                metavar=metavar,
                help=text,
                rich_help_panel=SPECULATION,
                show_default=False,
            ),
        )
        for name, (metavar, text) in specs.items()
    ]
