"""Merges command line, environment and YAML file into the frozen configurations, in that order of precedence.

Every option has one name, its field's: `max_model_len` is `--max-model-len` on the command line, `SONAR_MAX_MODEL_LEN`
in the environment and `max_model_len` (or `max-model-len`) in the file. This is the one place that reads the
environment.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from sonar_engine.config import SHIPPED, EngineConfig, LossyConfig, SpeculativeConfig
from sonar_engine.errors import ConfigError, reason
from sonar_engine.server.config import ServerConfig

ENV_PREFIX = "SONAR_"
# Variables with the prefix that are no options: the model cache, and what Kubernetes sets for a service named "sonar".
OTHER_ENV_NAMES = frozenset({"SONAR_CACHE", "SONAR_CONFIG"})
FOREIGN_ENV_PREFIXES = ("SONAR_SERVICE_", "SONAR_PORT_")

SPECULATIVE_CONFIG = "speculative_config"
SPECULATIVE_SHORTHANDS = {
    "spec_method": "method",
    "spec_model": "model",
    "num_speculative_tokens": "num_speculative_tokens",
}
PUBLIC_NAMES = {
    "api_keys": "api_key",
    "cors_origins": "cors_origin",
}  # field -> option, where the option can be given several times
DTYPE_ALIASES = {"fp32": "float32", "float": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}
SECRET_OPTIONS = frozenset({"api_key", "admin_key", "admin_api_key"})

SourceKind = Literal["file", "environment", "command line"]
Config = TypeVar("Config", bound=BaseModel)


class LoadedConfig(NamedTuple):
    """The two frozen halves of one configuration."""

    engine: EngineConfig
    server: ServerConfig


@dataclass(frozen=True)
class Source:
    """Options from one place, by option name; a value that is None counts as absent."""

    kind: SourceKind
    values: Mapping[str, Any]
    path: Path | None = None

    def spell(self, option: str) -> str:
        """The option as its user wrote it, with its source."""
        if self.kind == "command line":
            return f"--{option.replace('_', '-')}"
        if self.kind == "environment":
            return f"{ENV_PREFIX}{option.upper()} (environment)"
        return f"{option} ({self.path})"


def option_names(model: type[BaseModel]) -> dict[str, str]:
    """Option name -> field name of one configuration class; `speculative` is spelled by its own options."""
    fields = (name for name in model.model_fields if name != "speculative")
    return {PUBLIC_NAMES.get(name, name): name for name in fields}


def known_options() -> tuple[str, ...]:
    """Every option name, in the order of the configuration classes."""
    names = [*option_names(EngineConfig), SPECULATIVE_CONFIG, *SPECULATIVE_SHORTHANDS, *option_names(ServerConfig)]
    return tuple(dict.fromkeys(names))


def process_environment() -> dict[str, str]:
    """A copy of this process's `SONAR_*` variables."""
    return {name: value for name, value in os.environ.items() if name.startswith(ENV_PREFIX)}


def cache_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Where fetched models are kept: `SONAR_CACHE`, or `~/.cache/sonar`."""
    asked = (process_environment() if environ is None else environ).get("SONAR_CACHE")
    return Path(asked).expanduser() if asked else Path.home() / ".cache" / "sonar"


def load_config(cli: Mapping[str, Any], environ: Mapping[str, str], file: Path | None = None) -> LoadedConfig:
    """Validated configuration from all sources; the command line wins over the environment, that over the file.

    `cli` maps option names to values or None; `file` defaults to the environment's `SONAR_CONFIG`.
    Raises ConfigError with one line that names the option, its source and the right form.
    """
    if file is None and environ.get("SONAR_CONFIG"):
        file = Path(environ["SONAR_CONFIG"])
    sources = [Source("environment", _environment_options(environ)), Source("command line", _present(cli))]
    if file is not None:
        sources.insert(0, Source("file", _file_options(file), file))
    for source in sources:
        _reject_unknown(source)
    engine_values, engine_origin = _merge(sources, option_names(EngineConfig))
    speculative = _merge_speculative(sources)
    if speculative is not None:
        engine_values["speculative"] = speculative.values
        engine_origin["speculative"] = speculative.source
    server_values, server_origin = _merge(sources, option_names(ServerConfig))
    return LoadedConfig(
        _build(EngineConfig, engine_values, engine_origin), _build(ServerConfig, server_values, server_origin)
    )


def load_stage(model: type[Config], values: Mapping[str, Any], file: Path | None = None) -> Config:
    """One configuration class from the command line, or from a part of `file`, without environment.

    Raises ConfigError with one line that names the option and the right form.
    """
    source = Source("command line", _present(values)) if file is None else Source("file", _present(values), file)
    known = option_names(model)
    for option in source.values:
        if option not in known:
            close = difflib.get_close_matches(option, list(known), n=1)
            ways = f"did you mean {source.spell(close[0])}?" if close else f"known: {', '.join(known)}"
            raise ConfigError(f"{source.spell(option)}: no such option; {ways}")
    for option, field in known.items():
        if model.model_fields[field].is_required() and option not in source.values:
            raise ConfigError(f"{source.spell(option)} is missing: {model.model_fields[field].description}")
    merged, origin = _merge([source], known)
    return _build(model, merged, origin)


def _present(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _environment_options(environ: Mapping[str, str]) -> dict[str, str]:
    options = {}
    for name, value in environ.items():
        ours = name.startswith(ENV_PREFIX) and name not in OTHER_ENV_NAMES
        if ours and not name.startswith(FOREIGN_ENV_PREFIXES):
            options[name.removeprefix(ENV_PREFIX).lower()] = value
    return options


def _file_options(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}; give a readable YAML file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--config {path}: not UTF-8 text; give a YAML file") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        raise ConfigError(f"--config {place}: not valid YAML: {getattr(error, 'problem', None) or error}") from error
    except (ValueError, RecursionError) as error:  # numbers of too many digits, too deep nesting
        raise ConfigError(f"--config {path}: not usable YAML: {reason(error)}") from error
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError(f"--config {path}: must be a mapping of options to values, such as 'max_num_seqs: 32'")
    return _present({key.replace("-", "_"): value for key, value in content.items()})


def _reject_unknown(source: Source) -> None:
    known = known_options()
    for option in source.values:
        if option not in known:
            raise ConfigError(f"{source.spell(option)}: no such option{_suggestion(option, known, source)}")


def _suggestion(option: str, known: Iterable[str], source: Source) -> str:
    close = difflib.get_close_matches(option, list(known), n=1)
    return f"; did you mean {source.spell(close[0])}?" if close else "; `sonar serve --help` lists them"


def _merge(sources: list[Source], fields: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, Source]]:
    """Values by field name, and where each came from; later sources win."""
    values: dict[str, Any] = {}
    origin: dict[str, Source] = {}
    for source in sources:
        for option, field in fields.items():
            if option not in source.values:
                continue
            value = source.values[option]
            if option in PUBLIC_NAMES.values() and isinstance(value, str):
                value = [part.strip() for part in value.split(",") if part.strip()]
            if option == "dtype":
                value = DTYPE_ALIASES.get(str(value), value)
            values[field], origin[field] = value, source
    return values, origin


@dataclass(frozen=True)
class _Speculative:
    values: dict[str, Any]
    source: Source


def _merge_speculative(sources: list[Source]) -> _Speculative | None:
    """A whole `speculative_config` replaces what weaker sources said; the shorthands change single fields of it."""
    values: dict[str, Any] = {}
    last: Source | None = None
    for source in sources:
        whole = source.values.get(SPECULATIVE_CONFIG)
        shorthands = {key: source.values[key] for key in SPECULATIVE_SHORTHANDS if key in source.values}
        if whole is not None:
            if shorthands:
                both = source.spell(next(iter(shorthands)))
                raise ConfigError(f"{both} and {source.spell(SPECULATIVE_CONFIG)} say the same thing; give one of them")
            values = _speculative_mapping(whole, source)
        values.update({SPECULATIVE_SHORTHANDS[key]: value for key, value in shorthands.items()})
        if whole is not None or shorthands:
            last = source
    if last is None:
        return None
    if values.get("model") == SHIPPED:
        values.setdefault("method", "mtp")
    if "method" not in values and values:
        field = next(iter(values))
        raise ConfigError(f"{_spell_speculative(field, last)}: needs a method; add {last.spell('spec_method')} ngram")
    return _Speculative(values, last)


def _speculative_mapping(value: Any, source: Source) -> dict[str, Any]:
    """A speculative configuration as a mapping; on the command line and in the environment it is JSON."""
    example = '{"method": "ngram", "num_speculative_tokens": 4}'
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:  # also numbers of too many digits, and too deep nesting
            place = f" at character {error.pos}" if isinstance(error, json.JSONDecodeError) else ""
            raise ConfigError(
                f"{source.spell(SPECULATIVE_CONFIG)}: not valid JSON ({reason(error)}{place}); right: {example}"
            ) from error
    if not isinstance(value, dict):
        raise ConfigError(f"{source.spell(SPECULATIVE_CONFIG)}: must be an object, such as {example}")
    return _present(value)


def _spell_speculative(field: str, source: Source) -> str:
    for shorthand, name in SPECULATIVE_SHORTHANDS.items():
        if name == field and shorthand in source.values:
            return source.spell(shorthand)
    return f"{source.spell(SPECULATIVE_CONFIG)}: {field}"


def _build(model: type[Config], values: dict[str, Any], origin: Mapping[str, Source]) -> Config:
    try:
        return model(**values)
    except ValidationError as error:
        raise ConfigError(_explain(error, model, origin)) from None


def _explain(error: ValidationError, model: type[BaseModel], origin: Mapping[str, Source]) -> str:
    """The first fault of a validation in one line, and how many more there are."""
    faults = error.errors(include_url=False)
    first = faults[0]
    path = [str(part) for part in first["loc"]]
    reason = first["msg"].removeprefix("Value error, ")
    reason = reason[:1].lower() + reason[1:]
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    if not path or path[0] not in origin:
        return f"{': '.join([*path, reason])}{more}"
    source = origin[path[0]]
    if path[0] == "speculative":
        place = _spell_speculative(path[1], source) if len(path) > 1 else source.spell(SPECULATIVE_CONFIG)
        place += "".join(f".{part}" for part in path[2:])
        if first["type"] == "extra_forbidden":
            fields = list((LossyConfig if path[1:-1] == ["lossy"] else SpeculativeConfig).model_fields)
            close = difflib.get_close_matches(path[-1], fields, n=1)
            allowed = f"did you mean {close[0]}?" if close else "known: " + ", ".join(fields)
            return f"{place}: no such field; {allowed}{more}"
    else:
        options = {field: option for option, field in option_names(model).items()}
        place = source.spell(options[path[0]])
        if options[path[0]] in SECRET_OPTIONS:
            return f"{place}: {reason}{more}"
    shown = "" if isinstance(first["input"], dict) else f" {json.dumps(first['input'], default=str)} is wrong:"
    return f"{place}:{shown} {reason}{more}"
