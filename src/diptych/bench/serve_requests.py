"""The requests that the flags of `diptych bench serve` describe: prompts, times, bodies."""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from diptych.bench.offline import SHAPE_PREFIX, model_directory
from diptych.bench.serve_arrivals import arrival_times
from diptych.bench.serve_prompts import (
    Load,
    RandomLengths,
    custom_loads,
    random_loads,
    sharegpt_loads,
    trace_loads,
)
from diptych.errors import ConfigError
from diptych.models.config import ModelConfig
from diptych.text.tokenizer import Tokenizer

# ids that every usual vocabulary has, for servers of which nothing is known
_ANY_VOCABULARY = range(100, 20_100)


def make_loads(args: argparse.Namespace) -> list[Load]:
    """The requests, in the order in which they are due.

    Raises:
        ConfigError: there are none.
    """
    rng = random.Random(args.seed)
    count, path = args.num_prompts, args.dataset_path
    if args.dataset_name == "random":
        lengths = RandomLengths(
            input_len=args.random_input_len,
            output_len=args.random_output_len,
            range_ratio=args.random_range_ratio,
            prefix_len=args.random_prefix_len,
        )
        loads = random_loads(rng, count, lengths, _vocabulary(args))
    elif path is None:
        raise ConfigError(f"--dataset-name {args.dataset_name} needs --dataset-path")
    elif args.dataset_name == "sharegpt":
        tokenizer = Tokenizer.from_directory(files_of(args))
        loads = sharegpt_loads(rng, count, path, tokenizer, args.sharegpt_output_len)
    elif args.dataset_name == "trace":
        scale = args.trace_length_scale
        loads = trace_loads(count, path, _vocabulary(args), args.seed, scale)
    else:
        loads = custom_loads(count, path, args.custom_output_len)
    if not loads:
        raise ConfigError(f"{path} has no request of a fitting length")
    return loads


def warm_up_loads(args: argparse.Namespace, loads: Sequence[Load]) -> list[Load]:
    """Requests as long as the first ones, whose prompts are others."""
    rng = random.Random(f"{args.seed} warm-up")
    found = []
    for number, load in enumerate(loads[: args.num_warmups]):
        if isinstance(load.prompt, str):
            found.append(Load(f"({number}) {load.prompt}", load.output_len))
        else:
            ids = rng.choices(_vocabulary(args), k=len(load.prompt))
            found.append(Load(ids, load.output_len))
    return found


def due_times(args: argparse.Namespace, loads: Sequence[Load]) -> list[float]:
    """A trace's own times, unless a rate is given."""
    times = [load.due_s for load in loads if load.due_s is not None]
    if len(times) == len(loads) and args.request_rate == float("inf"):
        return sorted(time / args.trace_speed for time in times)
    rng = random.Random(f"{args.seed} arrivals")
    return arrival_times(len(loads), args.request_rate, args.burstiness, rng, args.ramp)


def _vocabulary(args: argparse.Namespace) -> range:
    """Token ids to draw from."""
    if args.vocab_size:
        return range(args.vocab_size)
    if args.tokenizer or args.up or is_shape(args.model) or _has_config(args.model):
        return range(ModelConfig.from_directory(files_of(args)).vocab_size)
    return _ANY_VOCABULARY


def files_of(args: argparse.Namespace) -> Path:
    """Where the model's files lie."""
    place = args.tokenizer or args.model or "smollm2"
    return model_directory(argparse.Namespace(model=place))


def is_shape(model: str | None) -> bool:
    """Whether it is one of this package's shapes, with random weights."""
    return bool(model and model.startswith(SHAPE_PREFIX))


def _has_config(model: str | None) -> bool:
    return model == "smollm2" or bool(model and (Path(model) / "config.json").is_file())


def body_of(args: argparse.Namespace, model: str, load: Load) -> bytes:
    """The JSON of a request, made before it is due."""
    body: dict[str, Any] = {
        "model": model,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": load.output_len,
        "temperature": args.temperature,
    }
    if args.backend == "openai-chat":
        if not isinstance(load.prompt, str):
            raise ConfigError(f"{args.dataset_name} has token ids, which a chat cannot take")
        body["messages"] = [{"role": "user", "content": load.prompt}]
    else:
        body["prompt"] = load.prompt
    if args.ignore_eos:
        body["ignore_eos"] = True
    if args.return_token_ids:
        body["return_token_ids"] = True
    return msgspec.json.encode(body | args.extra_body)


def headers_of(args: argparse.Namespace) -> dict[str, str]:
    """Headers of every request."""
    headers = {}
    for item in args.header:
        name, found, value = item.partition("=")
        if not found:
            raise ConfigError(f"--header {item} is not KEY=VALUE")
        headers[name] = value
    if args.api_key:
        headers["Authorization"] = f"Bearer {args.api_key}"
    return headers
