"""Counts texts that are valid by their JSON schema: temperature 1, drafts, many requests at a time.

    python bench/structured.py --runs 1000

Exit code 1 when one text that ended by itself is not valid, or when one in a hundred ended by its length.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from typing import Any

import jsonschema
from sonar_engine.config import EngineConfig, SpeculativeConfig
from sonar_engine.engine import build_engine
from sonar_engine.types import SamplingParams, StructuredOutput

WORD = {"type": "string", "maxLength": 24}
NUMBER = {"type": "integer", "minimum": 0, "maximum": 5000}


def closed(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


SCHEMAS: dict[str, dict[str, Any]] = {
    "Describe a person.": closed(name=WORD, age={**NUMBER, "maximum": 120}, job=WORD),
    "Write down an order of a bookshop.": closed(
        customer=WORD,
        paid={"type": "boolean"},
        lines={"type": "array", "items": closed(title=WORD, count=NUMBER), "maxItems": 3},
    ),
    "Which weather do you like, and why?": closed(
        weather={"enum": ["sun", "rain", "snow", "wind"]}, why={"type": "string", "maxLength": 60}
    ),
    "Give a point on a map.": closed(
        lat={"type": "number", "minimum": -90, "maximum": 90, "multipleOf": 0.25},
        lon={"type": "number", "minimum": -180, "maximum": 180, "multipleOf": 0.25},
        label={"anyOf": [{"type": "null"}, WORD]},
    ),
    "When does the train leave?": closed(time={"type": "string", "pattern": "^([01][0-9]|2[0-3]):[0-5][0-9]$"}),
    "List a few colours.": {"type": "array", "items": WORD, "minItems": 1, "maxItems": 4},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=300)
    parser.add_argument("--num-threads", type=int, default=None)
    arguments = parser.parse_args()
    drafting = SpeculativeConfig(method="mtp", model="shipped", num_speculative_tokens=3, prompt_lookup=True)
    engine = build_engine(
        EngineConfig(
            model=arguments.model,
            max_model_len=1024,
            max_num_seqs=arguments.concurrency,
            num_threads=arguments.num_threads,
            speculative=drafting,
        )
    )
    questions = [list(SCHEMAS)[run % len(SCHEMAS)] for run in range(arguments.runs)]
    prompts = [engine.tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in questions]
    forms = {text: StructuredOutput(kind="json_schema", content=json.dumps(schema)) for text, schema in SCHEMAS.items()}
    params = [
        SamplingParams(temperature=1.0, max_tokens=arguments.max_tokens, structured=forms[text]) for text in questions
    ]
    began = time.monotonic()
    completions = engine.generate(prompts, params)
    seconds = time.monotonic() - began
    counts: Counter[str] = Counter()
    for text, completion in zip(questions, completions, strict=True):
        if completion.finish_reason == "stop" and not is_valid(completion.text, SCHEMAS[text]):
            print(f"not valid: {text} {completion.text!r}")
            counts["not valid"] += 1
        else:
            counts["valid" if completion.finish_reason == "stop" else str(completion.finish_reason)] += 1
    tokens = sum(len(completion.token_ids) for completion in completions)
    stats = engine.stats()
    accepted = stats.num_accepted_tokens / max(stats.num_drafts, 1)
    print(
        f"{counts['valid']:,} of {arguments.runs:,} valid, {counts['not valid']} not, {counts['length']} ended by "
        f"length, {counts['error']} by an error; {tokens:,} tokens in {seconds:.0f} s, "
        f"{1 + accepted:.2f} tokens a drafted step"
    )
    engine.close()
    return int(counts["not valid"] + counts["error"] > 0 or counts["length"] >= 0.01 * arguments.runs)


def is_valid(text: str, schema: dict[str, Any]) -> bool:
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
