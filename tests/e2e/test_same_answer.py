"""One answer whatever the path: one engine, split (through the store, through files, from memory to
memory), offline."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from diptych import LLM, SamplingParams
from tests.e2e.cluster import Api, Cluster, cluster
from tests.tiny_models import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

MODELS = [
    "smollm2",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
]
ENGINE = {"device": "cpu", "num_threads": 1, "max_model_len": 1024, "num_kv_blocks": 256}
STORY = (
    "Once upon a time, in a small town by the sea, there lived a clockmaker who had never been "
    "late. Every morning he opened his shop at eight, wound the forty-one clocks on his walls, and "
    "waited for the ships to come in. One winter the harbour froze, and no ship came for a month. "
    "The clockmaker, who had nothing to repair, began to build a clock that would show not the "
    "hours but the tides. When it was done, he noticed that"
)
PROMPTS = {"short": "The capital of France is", "long": STORY}
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.8, "top_p": 0.95, "top_k": 50, "seed": 7},
    "penalties": {"temperature": 1.0, "seed": 3, "repetition_penalty": 1.2, "min_p": 0.02},
}


@dataclass(frozen=True, eq=False)
class Answer:
    """What must not depend on the path."""

    text: str
    finish_reason: str
    num_prompt_tokens: int
    num_output_tokens: int
    logprobs: list[float]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Answer):
            return NotImplemented
        return (
            self.text == other.text
            and self.finish_reason == other.finish_reason
            and self.num_prompt_tokens == other.num_prompt_tokens
            and self.num_output_tokens == other.num_output_tokens
            and self.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        )


def served(api: Api, prompt: str, sampling: dict[str, Any]) -> Answer:
    body = api.complete(prompt, max_tokens=24, logprobs=1, **sampling)
    choice, usage = body["choices"][0], body["usage"]
    return Answer(
        choice["text"],
        choice["finish_reason"],
        usage["prompt_tokens"],
        usage["completion_tokens"],
        choice["logprobs"]["token_logprobs"],
    )


def offline(llm: LLM, prompt: str, sampling: dict[str, Any]) -> Answer:
    params = SamplingParams(max_tokens=24, logprobs=1, **sampling)
    (request,) = llm.generate(prompt, params, use_tqdm=False)
    output = request.outputs[0]
    at = zip(output.token_ids, output.logprobs or [], strict=True)
    return Answer(
        output.text,
        str(output.finish_reason),
        len(request.prompt_token_ids),
        len(output.token_ids),
        [entry[token].logprob for token, entry in at],
    )


def split_by_files(made: Cluster, folder: Path) -> Api:
    """A prefill and a decode worker that share a folder, and their router."""
    addresses = []
    for role, kv_role in (("prefill", "kv_producer"), ("decode", "kv_consumer")):
        transfer = {
            "kv_connector": "SharedStorageConnector",
            "kv_role": kv_role,
            "kv_connector_extra_config": {"shared_storage_path": str(folder)},
        }
        addresses.append(made.worker(role, kv_transfer_config=transfer, **ENGINE)[1])
    return made.router(*addresses)[1]


def split_by_store(made: Cluster, engine: dict[str, Any] = ENGINE) -> Api:
    store = made.kvstore()[1]
    roles = ("prefill", "decode")
    return made.router(*(made.worker(role, store=store, **engine)[1] for role in roles))[1]


def split_directly(made: Cluster, engine: dict[str, Any] = ENGINE) -> Api:
    roles = ("prefill", "decode")
    direct = {"handoff": "direct"}
    addresses = [made.worker(role, worker=direct, **engine)[1] for role in roles]
    return made.router(*addresses, handoff="direct")[1]


@pytest.fixture(scope="module", params=MODELS)
def paths(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[LLM, dict[str, Api]]]:
    """The offline engine, and the API of each served path."""
    directory = tmp_path_factory.mktemp("paths")
    model = request.param
    if model != "smollm2":
        model = str(make_tiny_model(directory / "model", model))
    with cluster(model, directory) as made:
        apis = {
            "one engine": made.router(made.worker("worker", **ENGINE)[1])[1],
            "split by the store": split_by_store(made),
            "split by files": split_by_files(made, directory / "files"),
            "split directly": split_directly(made),
        }
        with LLM(model, **ENGINE) as llm:
            made.wait_ready()
            yield llm, apis


@pytest.mark.parametrize("sampling", SAMPLING.values(), ids=SAMPLING)
@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
def test_every_path_gives_the_offline_answer(
    paths: tuple[LLM, dict[str, Api]], prompt: str, sampling: dict[str, Any]
) -> None:
    llm, apis = paths
    expected = offline(llm, prompt, sampling)
    answers = {name: served(api, prompt, sampling) for name, api in apis.items()}
    assert answers == dict.fromkeys(apis, expected)


@pytest.mark.parametrize("split", [split_by_store, split_directly])
def test_eight_bits_survive_the_split(
    tmp_path: Path, split: Callable[[Cluster, dict[str, Any]], Api]
) -> None:
    engine = ENGINE | {"quantization": "fp8", "kv_cache_dtype": "fp8"}
    model = make_tiny_model(tmp_path / "model")
    with cluster(model, tmp_path) as made:
        api = split(made, engine)
        with LLM(str(model), **engine) as llm, LLM(str(model), **ENGINE) as plain:
            made.wait_ready()
            for sampling in (SAMPLING["greedy"], SAMPLING["seeded"]):
                expected = offline(llm, STORY, sampling)
                assert served(api, STORY, sampling) == expected
                assert offline(plain, STORY, sampling).logprobs != expected.logprobs
