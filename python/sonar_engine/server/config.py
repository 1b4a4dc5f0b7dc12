"""Options of the HTTP server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from sonar_engine.logs import LogFormat
from sonar_engine.sampling.validation import MAX_LOGIT_BIAS, MAX_STOP_LEN, MAX_STOP_STRINGS, MAX_STRUCTURED_BYTES

Origin = Annotated[str, Field(pattern=r"^(\*|[a-z][a-z0-9+.-]*://[^/\s*?#@]+)$")]


class ServerConfig(BaseModel):
    """How the server listens, whom it lets in, and the limits on what it takes. Times in seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    host: str = Field(default="127.0.0.1", min_length=1, description="Address to listen on")
    port: int = Field(default=8000, ge=0, le=65535, description="Port to listen on; 0 picks a free one")
    api_keys: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        default=(), description="Key that requests must bear; may be given several times"
    )
    admin_key: str | None = Field(default=None, min_length=1, description="Key of the admin routes; off without one")
    cors_origins: tuple[Origin, ...] = Field(
        default=(),
        description="Origin whose pages may call the API, such as https://chat.example.org, or * for every one; may be "
        "given several times",
    )
    tls_certfile: Path | None = Field(default=None, description="Certificate chain (PEM): the server speaks HTTPS")
    tls_keyfile: Path | None = Field(
        default=None, description="Private key of the certificate (PEM); default: in the certificate's file"
    )
    tls_ca_certs: Path | None = Field(
        default=None, description="Authorities (PEM) of which clients must show a certificate; default: they need none"
    )
    served_model_name: str | None = Field(
        default=None, min_length=1, description="The model's name in the API; default: its own name"
    )
    on_engine_death: Literal["exit", "restart"] = Field(
        default="exit", description="What to do when the engine's process dies"
    )
    probe_timeout: float = Field(default=4.0, gt=0, description="How long /health waits for the engine to step")
    engine_hang_timeout: float = Field(
        default=60.0, gt=0, description="Silence after which an engine that owes an answer counts as dead"
    )
    shutdown_timeout: float = Field(default=30.0, ge=0, description="How long running requests may finish on SIGTERM")
    request_timeout: float | None = Field(
        default=None, gt=0, description="Longest time a request may take; default: no limit"
    )
    ping_interval: float = Field(default=15.0, gt=0, description="Comment sent on a stream that was silent this long")
    stats_interval: float = Field(default=10.0, gt=0, description="Interval of the log line while busy")
    log_format: LogFormat = Field(default="text", description="Log lines as text, or as one JSON object a line")
    log_requests: bool = Field(default=False, description="Log a line at the end of every request")
    per_request_metrics: bool = Field(default=False, description="Add a metrics object to every response")
    max_body_bytes: int = Field(default=32 << 20, ge=1, description="Largest request body")
    max_header_bytes: int = Field(default=64 << 10, ge=256, description="Largest size of a request's headers")
    max_header_count: int = Field(default=100, ge=1, description="Most headers of a request")
    max_prompts: int = Field(default=256, ge=1, description="Most prompts of one request")
    max_messages: int = Field(
        default=4096, ge=1, description="Most messages of one request, their content parts counted as well"
    )
    max_prompt_chars: int = Field(
        default=4 << 20, ge=1, description="Longest prompt text, or text of all messages, in characters"
    )
    max_n: int = Field(default=128, ge=1, description="Most choices of one prompt")
    max_stop_strings: int = Field(
        default=MAX_STOP_STRINGS, ge=0, le=MAX_STOP_STRINGS, description="Most stop strings of one request"
    )
    max_stop_chars: int = Field(
        default=MAX_STOP_LEN, ge=1, le=MAX_STOP_LEN, description="Longest stop string, in characters"
    )
    max_logit_bias: int = Field(default=MAX_LOGIT_BIAS, ge=0, le=MAX_LOGIT_BIAS, description="Most logit_bias entries")
    max_logprobs: int = Field(default=20, ge=0, le=20, description="Most alternatives reported at a position")
    max_schema_bytes: int = Field(
        default=64 << 10, ge=1, le=MAX_STRUCTURED_BYTES, description="Largest schema, regex, grammar or list of choices"
    )
    max_schema_depth: int = Field(default=32, ge=1, le=100, description="Deepest nesting of a JSON schema")
    max_queued_tokens: int = Field(
        default=4 << 20, ge=1, description="Most prompt tokens of sequences that wait for their first token"
    )
