"""Every error the engine raises on purpose, under one root.

Each message says what was wrong and what would be right. `InvalidRequestError` maps to HTTP 400,
`QueueFullError` to 429, `EngineDeadError` to 500, the rest to a non-zero exit code with one line.
"""

from __future__ import annotations


class SonarError(Exception):
    """Root of all errors of this package."""


def reason(error: BaseException) -> str:
    """First line of another library's error, for a message of ours."""
    message = getattr(error, "msg", None) or str(error)
    return (message.strip().splitlines() or [type(error).__name__])[0]


class ConfigError(SonarError):
    """An option, or a combination of options, that cannot work."""


class ModelLoadError(SonarError):
    """A model folder or file that is missing, damaged, or of an unknown architecture."""


class TokenizerMissingError(ModelLoadError):
    """A model that comes without a tokenizer."""


class InvalidRequestError(SonarError):
    """A request that cannot be served as it stands; `param` names the field, `code` the kind."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class QueueFullError(SonarError):
    """The waiting queue is at its limit; try again later."""


class StaleStepError(SonarError):
    """A step was committed or reverted twice, or out of order."""


class EngineDeadError(SonarError):
    """The engine's loop has ended; nothing can be served until it is started again."""


class VerdictError(SonarError):
    """A verdict that does not fit the step it was given for; the step stays in flight."""


class StorageError(SonarError):
    """A file that the file system refuses to write or to give."""


class TrainingError(SonarError):
    """Training data, states or a loss that cannot be used."""


class DivergedError(TrainingError):
    """A loss, or its gradient, that is no number."""
