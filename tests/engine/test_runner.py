from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from diptych.connectors.base import (
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorWorker,
    KVLayout,
)
from diptych.kernels.torch_ops import TorchOps
from diptych.sampling_params import SamplingParams
from tests.engine.runner_driver import GREEDY, RunnerDriver
from tests.tiny_models import ARCHITECTURES, make_tiny_model


@pytest.fixture(scope="module", params=ARCHITECTURES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "m", request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "m")


@pytest.fixture(scope="module")
def theirs(model: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(100 * seed + length)
    return torch.randint(3, 384, (length,), generator=generator).tolist()


@torch.inference_mode()
def reference(theirs: PreTrainedModel, tokens: list[int]) -> Tensor:
    """Log probabilities after each token, `[len, V]`."""
    return theirs(torch.tensor([tokens])).logits[0].log_softmax(-1)


def assert_continues(theirs: PreTrainedModel, driver: RunnerDriver, name: str) -> None:
    """Every sampled token is the reference's choice after those before it."""
    tokens, prompt = driver.tokens[name], driver.num_prompt[name]
    choices = reference(theirs, tokens).argmax(-1).tolist()
    assert tokens[prompt:] == choices[prompt - 1 : -1]


def test_log_probabilities_are_those_of_transformers(model: Path, theirs: PreTrainedModel) -> None:
    driver = RunnerDriver(model)
    prompt = prompt_of(70)
    params = SamplingParams(temperature=0.0, logprobs=-1, prompt_logprobs=3)
    driver.add("a", prompt, params)
    output = driver.step({"a": 70})

    want = reference(theirs, prompt)
    whole = output.logprobs["a"]
    assert whole.width == 385
    assert whole.token_ids[0] == driver.tokens["a"][-1] == int(want[-1].argmax())
    assert whole.ranks == [1]
    have = torch.empty(384)
    have[torch.tensor(whole.token_ids[1:])] = torch.tensor(whole.logprobs[1:])
    torch.testing.assert_close(have, want[-1], rtol=0, atol=1e-4)

    of_prompt = output.prompt_logprobs["a"]
    ids = torch.tensor(of_prompt.token_ids).view(69, 4)
    logprobs = torch.tensor(of_prompt.logprobs).view(69, 4)
    assert ids[:, 0].tolist() == prompt[1:]
    torch.testing.assert_close(logprobs, want[:-1].gather(1, ids), rtol=0, atol=1e-4)
    assert ids[:, 1:].tolist() == want[:-1].topk(3).indices.tolist()
    ranks = (want[:-1] > want[:-1].gather(1, ids[:, :1])).sum(1) + 1
    # two tokens may be so close that rounding swaps them
    assert of_prompt.ranks == pytest.approx(ranks.tolist(), abs=1)


def test_prefill_and_decode_run_in_one_step(model: Path, theirs: PreTrainedModel) -> None:
    driver = RunnerDriver(model)
    driver.add("a", prompt_of(40))
    driver.add("b", prompt_of(3))
    driver.step({"a": 40, "b": 3})
    driver.add("c", prompt_of(50))
    driver.step({"a": 1, "c": 50, "b": 1})  # computed in another order
    driver.step({"c": 1, "b": 1, "a": 1})
    for name in "abc":
        assert_continues(theirs, driver, name)


def test_in_a_mixed_step_those_that_decode_take_the_kernel_of_decode_steps(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = RunnerDriver(llama)
    driver.add("a", prompt_of(40))
    driver.add("b", prompt_of(3))
    driver.step({"a": 40, "b": 3})
    calls = []
    for name in ("paged_decode_attention", "paged_prefill_attention"):
        real = getattr(TorchOps, name)

        def noted(ops: TorchOps, q: Tensor, *args: Any, name: str = name, real: Any = real) -> Any:
            calls.append((name, len(q)))
            return real(ops, q, *args)

        monkeypatch.setattr(TorchOps, name, noted)
    driver.add("c", prompt_of(50))
    driver.step({"c": 50, "a": 1, "b": 1})
    both = [("paged_decode_attention", 2), ("paged_prefill_attention", 50)]
    # of the last layer only what is sampled after is wanted
    assert calls == 2 * both + [("paged_decode_attention", 3)]


def test_log_probabilities_of_many_rows_are_taken_in_parts(llama: Path, monkeypatch) -> None:
    """With a row that wants none between those that want different numbers."""
    answers = []
    for size in (128, 2):
        monkeypatch.setattr("diptych.engine.runner.LOGITS_CHUNK", size)
        driver = RunnerDriver(llama)
        for i in range(6):
            count = None if i == 1 else i
            driver.add(f"{i}", prompt_of(4, i), SamplingParams(temperature=0.0, logprobs=count))
        answers.append(driver.step({f"{i}": 4 for i in range(6)}))
    whole, parts = answers
    assert parts.sampled_token_ids == whole.sampled_token_ids
    assert parts.logprobs == whole.logprobs
    assert list(parts.logprobs) == ["0", "2", "3", "4", "5"]


def test_a_prompt_in_chunks_gives_what_it_gives_whole(model: Path, theirs: PreTrainedModel) -> None:
    driver = RunnerDriver(model)
    params = SamplingParams(temperature=0.0, logprobs=2, prompt_logprobs=0)
    driver.add("whole", prompt_of(61), params)
    whole = driver.step({"whole": 61})
    driver.add("chunks", prompt_of(61), params)
    parts = [driver.step({"chunks": count}) for count in (1, 16, 20, 24)]

    assert [list(part.sampled_token_ids) for part in parts] == [[], [], [], ["chunks"]]
    ours, theirs_ = parts[-1].logprobs["chunks"], whole.logprobs["whole"]
    assert ours.token_ids == theirs_.token_ids
    assert ours.logprobs == pytest.approx(theirs_.logprobs, abs=1e-4)
    chunked = [p for part in parts for p in part.prompt_logprobs["chunks"].logprobs]
    assert chunked == pytest.approx(whole.prompt_logprobs["whole"].logprobs, abs=1e-4)
    driver.decode("chunks", 5)
    assert_continues(theirs, driver, "chunks")


def test_a_preempted_request_goes_on_where_it_was(model: Path, theirs: PreTrainedModel) -> None:
    driver = RunnerDriver(model)
    driver.add("a", prompt_of(30))
    driver.decode("a", 6)
    driver.preempt("a")
    driver.step({"a": 20})
    driver.decode("a", 5)
    assert len(driver.tokens["a"]) == 30 + 6 + 5
    assert_continues(theirs, driver, "a")


def test_a_prefix_hit_is_not_computed_again(model: Path, theirs: PreTrainedModel) -> None:
    driver = RunnerDriver(model)
    prompt = prompt_of(50)
    driver.add("a", prompt)
    driver.decode("a", 2)
    driver.add("b", prompt[:32] + prompt_of(9), shared_with="a", num_shared=32)
    driver.step({"b": 9, "a": 1})
    driver.decode("b", 3)
    driver.decode("a", 3)
    assert_continues(theirs, driver, "a")
    assert_continues(theirs, driver, "b")


def test_seeded_sampling_does_not_depend_on_the_batch_or_its_history(llama: Path) -> None:
    driver = RunnerDriver(llama)
    params = SamplingParams(temperature=1.2, top_p=0.9, seed=7)
    driver.add("alone", prompt_of(20), params)
    alone = driver.decode("alone", 8)

    driver.add("a", prompt_of(20), params)
    driver.add("other", prompt_of(33), SamplingParams(temperature=1.0, seed=1, top_k=3))
    driver.step({"other": 33, "a": 7})
    driver.step({"other": 1, "a": 13})
    for _ in range(3):
        driver.step({"a": 1, "other": 1})
    driver.preempt("a", params)
    driver.finish("other")
    driver.decode("a", 4)
    assert driver.tokens["a"][20:] == alone

    # as after a hand-off: what was sampled elsewhere counts as output
    driver.add("handed", prompt_of(20), params, output=alone[:3])
    assert driver.decode("handed", 5) == alone


def test_a_row_is_free_for_another_request_once_its_own_has_ended(llama: Path) -> None:
    driver = RunnerDriver(llama, max_num_seqs=2)
    for i in range(5):
        driver.add(f"{i}", prompt_of(5, seed=i))
        driver.decode(f"{i}", 2)
        driver.finish(f"{i}")
    first = driver.tokens["0"]
    driver.add("again", prompt_of(5, seed=0))
    driver.decode("again", 2)
    assert driver.tokens["again"] == first


class RecordingConnector(KVConnectorWorker):
    """Notes what it is called for, and whether the KV was there then."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.cache: Tensor | None = None
        self.due = KVConnectorOutput()

    def register_kv_caches(self, kv_cache: Tensor, layout: KVLayout) -> None:
        assert kv_cache.shape == layout.shape
        self.cache = kv_cache

    def start_load_kv(self, metadata: KVConnectorMetadata) -> None:
        self.calls.append(f"load {self._filled()}")

    def wait_for_layer_load(self, layer: int) -> None:
        self.calls.append(f"wait {layer}")

    def save_kv_layer(self, layer: int) -> None:
        self.calls.append(f"layer {layer}")

    def wait_for_save(self, metadata: KVConnectorMetadata) -> None:
        self.calls.append(f"save {self._filled()}")

    def get_finished(self) -> KVConnectorOutput:
        return self.due

    def _filled(self) -> int:
        """Slots of block 0 that hold something."""
        assert self.cache is not None
        return int((self.cache[0, 0, 0, 0] != 0).any(-1).sum())


def test_a_connector_loads_before_a_step_and_saves_after_it(llama: Path) -> None:
    connector = RecordingConnector()
    driver = RunnerDriver(llama, connector)
    driver.add("a", prompt_of(5))
    driver.step({"a": 5}, KVConnectorMetadata())
    layers = [call for i in range(3) for call in (f"wait {i}", f"layer {i}")]
    assert connector.calls == ["load 0", *layers, "save 5"]


def test_a_step_without_tokens_only_serves_the_connector(llama: Path) -> None:
    connector = RecordingConnector()
    driver = RunnerDriver(llama, connector)
    output = driver.step({}, KVConnectorMetadata())
    assert connector.calls == ["load 0", "save 0"]
    assert output.sampled_token_ids == {}
    assert output.kv_connector_output is None

    connector.due = KVConnectorOutput(finished_recving={"a"})
    assert driver.step({}).kv_connector_output is connector.due


def test_loaded_kv_counts_as_computed(llama: Path) -> None:
    """The cache tensor is written from outside, as a transfer thread does it."""
    first, second = RunnerDriver(llama), RecordingConnector()
    first.add("a", prompt_of(40), GREEDY)
    tokens = first.decode("a", 4)
    source = first.executor._runner._kv_cache  # type: ignore[union-attr]

    driver = RunnerDriver(llama, second)
    assert second.cache is not None
    second.cache[10:13] = source[first.blocks["a"][:3]]
    driver._next_block = 10
    driver.add("a", prompt_of(40), GREEDY, output=tokens[:1], shared_with=None)
    driver._new[0].num_computed_tokens = driver.computed["a"] = 40
    assert driver.decode("a", 3) == tokens
