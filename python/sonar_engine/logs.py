"""Log lines as text or as one JSON object a line, stamped in UTC, alike for server, libraries and engine.

A record may bring `fields` (by `extra={"fields": {...}}`): members of the object, or `name=value` after the text.
"""

from __future__ import annotations

import logging
import re
import sys
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Literal

import msgspec

LogFormat = Literal["text", "json"]

_PLAIN = re.compile(r"[\w.:/+-]+", re.ASCII)
encode = msgspec.json.encode


def configure_logging(log_format: LogFormat = "text") -> None:
    """Lines of every logger of this process go to stderr; those of libraries from warnings on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("sonar_engine").setLevel(logging.INFO)
    logging.captureWarnings(True)
    sys.excepthook = _log_crash


def _log_crash(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """What nobody caught, as a line like any other."""
    if isinstance(error, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
    else:
        logging.getLogger("sonar_engine").critical("the process ends", exc_info=(kind, error, trace))


def utc_time(seconds: float) -> str:
    """ISO 8601 with milliseconds, such as 2026-01-31T12:00:00.250Z."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def json_line(seconds: float, level: str, logger: str, message: str, members: dict[str, Any]) -> str:
    """One line's object, without the line's end."""
    return encode({"time": utc_time(seconds), "level": level, "logger": logger, "message": message} | members).decode()


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        members = dict(_fields(record))
        if record.exc_info:
            members["exception"] = self.formatException(record.exc_info)
        return json_line(record.created, record.levelname, record.name, record.getMessage(), members)


class TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        named = [f"{name}={_shown(value)}" for name, value in _fields(record).items()]
        line = " ".join([utc_time(record.created), record.levelname, record.getMessage(), *named])
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields: dict[str, Any] = getattr(record, "fields", {})
    return fields


def _shown(value: Any) -> str:
    """Quoted unless it is one plain word, so that no value can look like another field or line."""
    if isinstance(value, list):
        return ",".join(_shown(each) for each in value)
    text = str(value)
    return text if _PLAIN.fullmatch(text) else encode(text).decode()
