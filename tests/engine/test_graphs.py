"""The bookkeeping of captured decode steps; on a CPU a step repeats by being called."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from diptych.engine.captured_decode import capture_decode
from diptych.engine.captured_mixed import capture_mixed
from diptych.engine.executor import UniprocExecutor
from diptych.engine.graphs import (
    DecodeGraphs,
    MixedGraphs,
    MixedSize,
    batch_sizes,
    context_lengths,
    fit,
    mixed_sizes,
)
from diptych.engine.runner import ModelRunner
from diptych.kernels.dispatch import select_ops
from diptych.sampling_params import SamplingParams
from tests.engine.runner_driver import RunnerDriver
from tests.engine.test_runner import RecordingConnector, prompt_of
from tests.tiny_models import make_tiny_model

CPU = torch.device("cpu")
MIXED = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.9, seed=3),
    SamplingParams(temperature=1.2, seed=4, top_p=0.8, logprobs=2),
    SamplingParams(temperature=0.7, seed=5, top_k=9, min_p=0.02),
    SamplingParams(temperature=0.0, frequency_penalty=0.8, logprobs=0),
]
PLAIN = [SamplingParams(temperature=0.7 * (i % 2), seed=i) for i in range(5)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "m")


@pytest.mark.parametrize("most", [1, 2, 5, 8, 64, 100, 256, 300, 1024])
def test_the_ladder_ascends_to_the_most_and_pads_little(most: int) -> None:
    sizes = batch_sizes(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == most
    for wanted in range(1, most + 1):
        size = fit(sizes, wanted)
        assert wanted <= size <= max(wanted + 7, wanted * 1.25)


def test_the_last_context_is_the_longest_of_the_model() -> None:
    assert context_lengths(512) == [512]
    assert context_lengths(8192) == [2048, 8192]
    assert context_lengths(131072) == [2048, 8704, 32768, 131072]


def test_a_step_runs_in_the_next_larger_graph_captured_largest_first() -> None:
    captured: list[tuple[int, int]] = []
    replayed: list[tuple[int, int]] = []

    def capture(run: Callable[[], None]) -> Callable[[], None]:
        run()
        key = captured[-1]
        return lambda: replayed.append(key)

    graphs = DecodeGraphs(lambda *key: captured.append(key), [1, 2, 4], [32, 64], capture)
    assert captured == [(4, 64), (4, 32), (2, 64), (2, 32), (1, 64), (1, 32)]
    for rows, longest in ((1, 1), (3, 32), (2, 33), (4, 64)):
        graphs.replay(rows, longest)
    assert replayed == [(1, 32), (4, 32), (2, 64), (4, 64)]


def capture_on_a_cpu(executor: UniprocExecutor) -> ModelRunner:
    """Have it run steps as with graphs, where a graph is the call that it was made of."""
    runner = executor._runner
    assert runner is not None
    batch, ops = runner._batch, select_ops(CPU)
    runner._decode = capture_decode(
        runner._model,
        ops,
        runner._kv_cache,
        batch,
        runner._sampler,
        vocab_size=384,
        max_model_len=512,
        capture=lambda run: run,
    )
    runner._mixed = capture_mixed(
        runner._model,
        ops,
        runner._kv_cache,
        batch,
        runner._sampler,
        runner._decode.step.logits,
        max_num_tokens=128,
        max_model_len=512,
        capture=lambda run: run,
    )
    return runner


class CapturedDriver(RunnerDriver):
    """Decodes as with graphs, and notes their sizes."""

    def __init__(self, model: Path, **settings) -> None:
        super().__init__(model, **settings)
        self.sizes: list[int] = []
        runner = capture_on_a_cpu(self.executor)
        assert runner._decode is not None
        self.cache, runner._mixed = runner._kv_cache, None
        run = runner._decode.step.run
        runner._decode.graphs._replays = {
            key: lambda key=key: (self.sizes.append(key[0]), run(*key))
            for key in runner._decode.graphs._replays
        }


class MixedDriver(RunnerDriver):
    """Runs steps as with graphs of prompts, and notes sizes and contexts."""

    def __init__(self, model: Path, **settings) -> None:
        super().__init__(model, **settings)
        self.runs: list[tuple[MixedSize, int]] = []
        runner = capture_on_a_cpu(self.executor)
        assert runner._mixed is not None
        self.cache, runner._decode = runner._kv_cache, None
        run = runner._mixed.step.run
        runner._mixed.graphs._replays = {
            key: lambda key=key: (self.runs.append(key), run(*key))
            for key in runner._mixed.graphs._replays
        }


def story(driver: RunnerDriver, params: list[SamplingParams]) -> list:
    """Requests join, leave and are preempted while others decode past their blocks."""
    outputs = []
    for i, sampling in enumerate(params[:3]):
        driver.add(f"{i}", prompt_of(14 + i), sampling)
    outputs.append(driver.step({"0": 14, "1": 15, "2": 16}))
    outputs += [driver.step({"0": 1, "1": 1, "2": 1}) for _ in range(6)]
    driver.add("3", prompt_of(33), params[3])
    driver.add("4", prompt_of(2), params[4])
    outputs.append(driver.step({"0": 1, "3": 33, "4": 2, "2": 1}))
    driver.preempt("1", params[1])
    outputs += [driver.step({"4": 1, "2": 1, "0": 1, "3": 1}) for _ in range(3)]
    outputs.append(driver.step({"1": len(driver.tokens["1"])}))
    driver.finish("0")
    outputs += [driver.step({"1": 1, "2": 1, "3": 1, "4": 1}) for _ in range(12)]
    outputs += [driver.step({"3": 1}) for _ in range(2)]
    return outputs


@pytest.mark.parametrize("params", [MIXED, PLAIN], ids=["mixed", "plain"])
def test_captured_steps_sample_what_the_others_do(model: Path, params: list) -> None:
    plain, captured = RunnerDriver(model), CapturedDriver(model)
    expected, found = story(plain, params), story(captured, params)
    # three rows are padded to four
    assert captured.sizes == [4] * 21 + [1] * 2
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.sampled_token_ids == theirs.sampled_token_ids
        assert ours.logprobs.keys() == theirs.logprobs.keys()
        for name, logprobs in theirs.logprobs.items():
            assert ours.logprobs[name].token_ids == logprobs.token_ids
            assert ours.logprobs[name].logprobs == pytest.approx(logprobs.logprobs, abs=1e-4)


@pytest.mark.parametrize("params", [MIXED, PLAIN], ids=["mixed", "plain"])
def test_captured_prompts_give_what_the_others_do(model: Path, params: list) -> None:
    plain, captured = RunnerDriver(model), MixedDriver(model)
    expected, found = story(plain, params), story(captured, params)
    # those that only decode run here as well
    assert len(captured.runs) == len(found)
    assert [size for size, _ in captured.runs if not size.singles] == 2 * [(0, 64)]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.sampled_token_ids == theirs.sampled_token_ids
        for name, logprobs in theirs.logprobs.items():
            assert ours.logprobs[name].logprobs == pytest.approx(logprobs.logprobs, abs=1e-4)


def test_a_captured_prompt_in_chunks_beside_others_takes_tokens_from_the_device(
    model: Path,
) -> None:
    found = []
    for driver in (RunnerDriver(model), MixedDriver(model)):
        driver.add("a", prompt_of(9), PLAIN[1])
        driver.add("b", prompt_of(70), PLAIN[3])
        handles = [driver.submit({"a": 9, "b": 20})]
        tokens: dict[str, list[int]] = {"a": [], "b": []}
        for step in ({"b": 25, "a": 1}, {"a": 1, "b": 25}, {"b": 1, "a": 1}):
            handles.append(driver.submit(step))
            for name, sampled in handles.pop(0).result().sampled_token_ids.items():
                tokens[name] += sampled
        for name, sampled in handles.pop().result().sampled_token_ids.items():
            tokens[name] += sampled
        found.append(tokens)
    assert found[0] == found[1]
    assert len(found[0]["a"]) == 4


def test_a_captured_prompt_writes_its_own_slots_alone(model: Path) -> None:
    driver = MixedDriver(model)
    assert not driver.cache.any()  # nor has capturing
    driver.add("a", prompt_of(20), PLAIN[0])
    driver.step({"a": 20})
    assert driver.runs == [((0, 64), 512)]
    used = (driver.cache != 0).flatten(1).any(1).nonzero()[:, 0].tolist()
    assert used == driver.blocks["a"]
    mixed = driver.executor._runner._mixed  # type: ignore[union-attr]
    # padding sequences have no tokens
    assert mixed.step._inputs["many_starts"].tolist() == [0] + [20] * 32
    slots = (driver.cache[driver.blocks["a"][1], 0, 0, 0] != 0).any(-1)
    assert slots.tolist() == [True] * 4 + [False] * 12


def test_prompts_find_the_least_graph_that_pays() -> None:
    sizes = mixed_sizes(256, 8192)
    graphs = MixedGraphs(lambda *key: None, sizes, [2048, 8192], 32, lambda run: run)
    for step, key in {
        (0, 1, 1, 50): ((0, 64), 2048),
        (0, 64, 3, 2048): ((0, 64), 2048),
        (0, 65, 1, 2049): ((0, 128), 8192),
        (0, 90, 1, 50): ((0, 128), 2048),
        (5, 60, 1, 50): ((32, 96), 2048),
        (32, 480, 1, 50): ((32, 480), 2048),
        (32, 512, 1, 50): ((32, 608), 2048),
        (33, 200, 2, 50): ((256, 256), 2048),
        (0, 300, 1, 300): ((0, 512), 2048),
        (0, 1000, 1, 1000): ((0, 1024), 2048),
    }.items():
        assert graphs.find(*step) == key
    assert graphs.find(0, 700, 1, 700) is None  # more padding than launching costs
    assert graphs.find(0, 1025, 1, 1025) is None
    assert graphs.find(5, 900, 1, 900) is None
    assert graphs.find(0, 64, 1, 8193) is None
    assert graphs.find(0, 66, 33, 50) is None
    assert mixed_sizes(4, 200) == [(0, 64), (0, 128), (4, 124)]
    assert mixed_sizes(4, 20) == []


def test_padding_writes_nothing_to_the_cache(model: Path) -> None:
    driver = CapturedDriver(model)
    for name in "abc":
        driver.add(name, prompt_of(20), PLAIN[0])
        driver.step({name: 20})
    before = driver.cache.clone()
    driver.step({"a": 1, "b": 1, "c": 1})
    assert driver.sizes == [4]
    changed = (driver.cache != before).flatten(1).any(1).nonzero()[:, 0].tolist()
    # each wrote its 21st token, in its second block
    assert changed == [driver.blocks[name][1] for name in "abc"]


def test_a_connector_has_loaded_every_layer_before_a_graph_runs(model: Path) -> None:
    driver = CapturedDriver(model)
    driver.add("a", prompt_of(5), PLAIN[0])
    driver.step({"a": 5})
    connector = connect(driver)
    driver.step({"a": 1})
    assert driver.sizes == [1]
    assert connector.calls == ["wait 0", "wait 1", "wait 2"]


def test_a_connector_hears_of_every_layer_before_and_after_a_captured_prompt(model: Path) -> None:
    driver = MixedDriver(model)
    connector = connect(driver)
    driver.add("a", prompt_of(5), PLAIN[0])
    driver.step({"a": 5})
    assert driver.runs == [((0, 64), 512)]
    assert connector.calls == [
        f"{event} {layer}" for event in ("wait", "layer") for layer in (0, 1, 2)
    ]


def connect(driver: CapturedDriver | MixedDriver) -> RecordingConnector:
    connector = RecordingConnector()
    connector.register_kv_caches(driver.cache, driver.executor.kv_layout)
    driver.executor._runner._connector = connector  # type: ignore[union-attr]
    return connector
