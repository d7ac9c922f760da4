"""What the offline benchmarks share: the engine's flags, random prompts, the report.

A model may be a named shape, `shape:llama-3.1-8b`: a config.json that is part of this package, with
random weights. Such a model, or any directory without a tokenizer.json, runs on token ids alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diptych.bench.report import environment, write_result
from diptych.config import EngineConfig
from diptych.config_sources import build
from diptych.errors import ConfigError
from diptych.inputs import TokensPrompt
from diptych.models.fetch import resolve_model

if TYPE_CHECKING:
    from diptych.engine.llm import LLM

SHAPE_PREFIX = "shape:"
_ENGINE_DEST = "engine."
_SHAPES = Path(__file__).with_name("shapes")


def count(text: str) -> int:
    """An argument that must be at least 1.

    Raises:
        argparse.ArgumentTypeError: it is not.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 1 or more")
    return int(text)


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the engine under test, of the random seed and of the report."""
    add = parser.add_argument
    add(
        "--model",
        default="smollm2",
        help="smollm2, a directory, a hub id, a .gguf file, or a shape with random weights: "
        + ", ".join(SHAPE_PREFIX + name for name in shape_names()),
    )
    add("--device", default="auto", help="auto, cpu or cuda")
    add("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    add("--load-format", default="auto", help="auto, or dummy for random weights")
    add("--num-threads", type=int, default=None, help="CPU threads of torch")
    add("--max-model-len", type=int, default=None, help="longest prompt plus output")
    add("--max-num-seqs", type=int, default=None, help="most requests per step")
    add("--max-num-batched-tokens", type=int, default=None, help="most tokens per step")
    add("--attention-backend", default="auto", help="auto, torch, triton or fa3")
    add("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=False)
    add("--seed", type=int, default=0, help="seed of prompts and sampling")
    add("--output-json", type=Path, default=None, help="write the figures to this file")
    add("--result-dir", type=Path, default=None, help="write a dated record into this folder")
    _add_other_engine_flags(parser)


def _add_other_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Whatever else an engine can be told, as `diptych serve` takes it."""
    group = parser.add_argument_group("engine")
    taken = {action.dest for action in parser._actions}
    for field in dataclasses.fields(EngineConfig):
        if field.name not in taken:
            text = str(field.metadata.get("help", "")).replace("%", "%%")
            flag = "--" + field.name.replace("_", "-")
            boolean = str(field.type).startswith("bool")
            group.add_argument(
                flag,
                dest=_ENGINE_DEST + field.name,
                default=None,
                help=text,
                **({"action": argparse.BooleanOptionalAction} if boolean else {"metavar": "VALUE"}),
            )


def shape_names() -> list[str]:
    """Shapes that are part of this package."""
    return sorted(path.parent.name for path in _SHAPES.glob("*/config.json"))


def model_directory(args: argparse.Namespace) -> Path:
    """Where the model of the flags lies; a shape sets `args.load_format` to dummy.

    Raises:
        ConfigError: there is no such shape.
        ModelLoadError: there is no such model.
    """
    if not args.model.startswith(SHAPE_PREFIX):
        return resolve_model(args.model, getattr(args, _ENGINE_DEST + "revision", None))
    name = str(args.model).removeprefix(SHAPE_PREFIX)
    if name not in shape_names():
        raise ConfigError(f"there is no shape {name!r}, only {', '.join(shape_names())}")
    args.load_format = "dummy"
    return _SHAPES / name


def engine_arguments(args: argparse.Namespace, **changes: Any) -> dict[str, Any]:
    """Keyword arguments of the engine that the flags describe; `changes` come before them."""
    flags = vars(args)
    names = {field.name for field in dataclasses.fields(EngineConfig)} - {"model"}
    arguments = {name: flags[name] for name in names & flags.keys()}
    given = {name: flags.get(_ENGINE_DEST + name) for name in names}
    others = build(EngineConfig, {k: v for k, v in given.items() if v is not None}, "engine")
    arguments |= {k: getattr(others, k) for k, v in given.items() if v is not None}
    return arguments | changes


def make_llm(args: argparse.Namespace, **changes: Any) -> LLM:
    """The engine that the flags describe; `changes` come before them."""
    # here, so that torch comes first where start-up is measured
    from diptych.engine.llm import LLM

    directory = model_directory(args)
    skip = not (directory / "tokenizer.json").exists()
    return LLM(str(directory), skip_tokenizer_init=skip, **engine_arguments(args, **changes))


def random_prompts(
    rng: random.Random, count: int, length: int, vocab_size: int
) -> list[TokensPrompt]:
    """`count` prompts of `length` random token ids."""
    return [{"prompt_token_ids": rng.choices(range(vocab_size), k=length)} for _ in range(count)]


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the nearest ranks."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def say(text: str) -> None:
    """One line of the benchmark's answer on standard output."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _is_setting(name: str, value: Any) -> bool:
    """Whether a flag's value belongs into the record."""
    plain = value is None or isinstance(value, str | int | float | bool)
    absent = value is None and name.startswith(_ENGINE_DEST)
    return plain and not absent and name not in ("output_json", "result_dir", "command", "kind")


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """The flags, for the record."""
    return {k: v for k, v in vars(args).items() if _is_setting(k, v)}


def report(name: str, args: argparse.Namespace, device: str, figures: Mapping[str, Any]) -> None:
    """Write the figures where the flags ask for it."""
    payload = {"settings": settings_of(args), **figures}
    if args.output_json is not None:
        record = {"name": name, **environment(device), **payload}
        args.output_json.parent.mkdir(parents=True, exist_ok=True)
        args.output_json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    if args.result_dir is not None:
        path = write_result(name, payload, device=device, directory=args.result_dir)
        say(f"wrote {path}")
