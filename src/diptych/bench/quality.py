"""`diptych bench quality`: what eight-bit weights and KV cost in answers.

The model reads a text, window by window, as it is and with weights, KV and both in fp8. Two figures
compare them: the perplexity of the text, and how often the likeliest next token is still the same.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from diptych.bench.offline import add_engine_arguments, make_llm, report, say
from diptych.bench.report import DEFAULT_DIRECTORY
from diptych.errors import ConfigError
from diptych.inputs import TokensPrompt
from diptych.sampling_params import SamplingParams

TEXT = Path(__file__).with_name("texts") / "quality.txt"
PLAIN = "plain"
VARIANTS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "fp8 weights": {"quantization": "fp8"},
    "fp8 KV": {"kv_cache_dtype": "fp8"},
    "fp8 both": {"quantization": "fp8", "kv_cache_dtype": "fp8"},
}


@dataclass(frozen=True, slots=True)
class Scores:
    """Of each token that has tokens before it in its window.

    Attributes:
        logprobs: of the tokens of the text.
        likeliest: the tokens that the model finds likeliest there.
    """

    logprobs: list[float]
    likeliest: list[int]

    @property
    def perplexity(self) -> float:
        return math.exp(-sum(self.logprobs) / len(self.logprobs))


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One variant beside the plain model.

    Attributes:
        perplexity_change: relative; 0.01 is one per cent more.
        top1_agreement: share of positions with the same likeliest token.
        mean_logprob_distance: mean absolute difference of the text's log probabilities.
    """

    perplexity: float
    perplexity_change: float
    top1_agreement: float
    mean_logprob_distance: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this benchmark."""
    add = parser.add_argument
    add("--text", type=Path, default=TEXT, help="what is read; a text of this package if absent")
    add("--window", type=int, default=512, help="tokens that are read at once")
    add("--max-tokens", type=int, default=None, help="of the text; all if absent")
    add_engine_arguments(parser)
    parser.set_defaults(result_dir=DEFAULT_DIRECTORY)


def main(args: argparse.Namespace) -> int:
    """Measure, print, report."""
    if args.window < 2:
        raise ConfigError(f"window must be at least 2, not {args.window}")
    plain: Scores | None = None
    figures: dict[str, Figures] = {}
    say(f"{'':>12}  perplexity   change  same top-1  mean |d logprob|")
    for name, changes in VARIANTS.items():
        scores, device = _read(args, changes)
        plain = plain or scores
        found = figures[name] = compare(scores, plain)
        say(
            f"{name:>12}  {found.perplexity:10.3f}  {found.perplexity_change:+6.2%}"
            f"  {found.top1_agreement:10.2%}  {found.mean_logprob_distance:10.4f}"
        )
    assert plain is not None
    payload = {name: asdict(found) for name, found in figures.items()}
    report("quality", args, device, {"num_tokens": len(plain.logprobs), "variants": payload})
    return 0


def compare(scores: Scores, plain: Scores) -> Figures:
    """The figures of a variant."""
    count = len(plain.logprobs)
    same = sum(a == b for a, b in zip(scores.likeliest, plain.likeliest, strict=True))
    distances = [abs(a - b) for a, b in zip(scores.logprobs, plain.logprobs, strict=True)]
    return Figures(
        perplexity=scores.perplexity,
        perplexity_change=scores.perplexity / plain.perplexity - 1.0,
        top1_agreement=same / count,
        mean_logprob_distance=sum(distances) / count,
    )


def _read(args: argparse.Namespace, changes: dict[str, Any]) -> tuple[Scores, str]:
    """The scores of one variant, and the device it ran on."""
    if args.max_model_len is None:
        changes = changes | {"max_model_len": args.window + 1}
    with make_llm(args, **changes) as llm:
        token_ids = llm.get_tokenizer().encode(args.text.read_text(encoding="utf-8"))
        windows = _windows(token_ids[: args.max_tokens], args.window)
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
        outputs = llm.generate(windows, params, use_tqdm=False)
        device = llm.device
    scores = Scores([], [])
    for output in outputs:
        assert output.prompt_logprobs is not None
        for token_id, at in zip(output.prompt_token_ids, output.prompt_logprobs, strict=True):
            if at is None:
                continue
            scores.logprobs.append(at[token_id].logprob)
            scores.likeliest.append(max(at, key=lambda token: at[token].logprob))
    return scores, device


def _windows(token_ids: Sequence[int], size: int) -> list[TokensPrompt]:
    """Without the last one if it is a single token, which nothing comes before."""
    parts = [list(token_ids[at : at + size]) for at in range(0, len(token_ids), size)]
    windows: list[TokensPrompt] = [{"prompt_token_ids": p} for p in parts if len(p) > 1]
    if not windows:
        raise ConfigError("the text has less than two tokens")
    return windows
