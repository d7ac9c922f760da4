"""The bookkeeping of captured decode steps; on a CPU a step repeats by being called."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from diptych.engine.captured_decode import capture_decode
from diptych.engine.graphs import DecodeGraphs, batch_sizes, context_lengths, fit
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
    assert context_lengths(131072) == [2048, 8192, 32768, 131072]


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


class CapturedDriver(RunnerDriver):
    """Decodes as with graphs, and notes their sizes."""

    def __init__(self, model: Path, **settings) -> None:
        super().__init__(model, **settings)
        self.sizes: list[int] = []
        runner = self.executor._runner
        assert runner is not None
        self.cache = runner._kv_cache
        runner._decode = capture_decode(
            runner._model,
            select_ops(CPU),
            runner._kv_cache,
            runner._batch,
            runner._sampler,
            vocab_size=384,
            max_model_len=512,
            capture=lambda run: run,
        )
        run = runner._decode.step.run
        runner._decode.graphs._replays = {
            key: lambda key=key: (self.sizes.append(key[0]), run(*key))
            for key in runner._decode.graphs._replays
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
    connector = RecordingConnector()
    connector.register_kv_caches(driver.cache, driver.executor.kv_layout)
    driver.executor._runner._connector = connector  # type: ignore[union-attr]
    driver.step({"a": 1})
    assert driver.sizes == [1]
    assert connector.calls == ["wait 0", "wait 1", "wait 2"]
