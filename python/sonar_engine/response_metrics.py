"""The `metrics` object of one response, for the server and for `sonar generate --json`."""

from __future__ import annotations

from typing import Any

from sonar_engine.types import RequestMetrics

MILLISECONDS = 1000.0


def response_metrics(metrics: RequestMetrics, num_tokens: int) -> dict[str, Any]:
    """Times in ms; `tokens_per_second` counts the tokens after the first over the time after the first.

    `num_tokens` is the number of output tokens. Rates without anything to divide by are None.
    """
    speculation = metrics.speculation
    return {
        "time_to_first_token_ms": metrics.time_to_first_token * MILLISECONDS,
        "queue_time_ms": metrics.queue_time * MILLISECONDS,
        "tokens_per_second": (num_tokens - 1) / metrics.decode_time if metrics.decode_time > 0 else None,
        "speculative_decoding": {
            "mean_acceptance_length": speculation.mean_acceptance_length,
            "draft_acceptance_rate": speculation.draft_acceptance_rate,
            "acceptance_histogram": speculation.acceptance_histogram,
            "num_spec_steps": speculation.num_spec_steps,
            "num_accepted_draft_tokens": speculation.num_accepted_draft_tokens,
            "num_draft_tokens": speculation.num_draft_tokens,
        },
    }
