"""The floors are those that can be worked out by hand."""

from dataclasses import replace
from pathlib import Path

import pytest

from diptych.bench import offline
from diptych.bench.roofline import Hardware, Roofline
from diptych.models.config import ModelConfig

SHAPES = Path(offline.__file__).with_name("shapes")


def roofline(name: str, **changes: int) -> Roofline:
    return Roofline(model=ModelConfig.from_directory(SHAPES / name), **changes)


LLAMA, QWEN = roofline("llama-3.1-8b"), roofline("qwen3-8b")


def test_bytes_of_the_shapes() -> None:
    assert LLAMA.num_weights * 2 == pytest.approx(15.01e9, rel=1e-3)
    assert QWEN.num_weights * 2 == pytest.approx(15.14e9, rel=1e-3)
    assert LLAMA.kv_bytes_per_token == 128 * 1024
    assert QWEN.kv_bytes_per_token == 144 * 1024


@pytest.mark.parametrize(
    ("batch", "context", "floor_ms"),
    [
        (1, 1024, 3.52),
        (8, 1024, 3.74),
        (32, 1024, 4.49),
        (64, 1024, 5.49),
        (128, 1024, 7.49),
        (256, 1024, 12.9),
        (8, 8192, 5.49),
        (32, 8192, 11.5),
        (4, 32000, 7.4),
    ],
)
def test_a_decode_step_reads_weights_and_kv_once(batch: int, context: int, floor_ms: float) -> None:
    assert LLAMA.decode_s(batch, context) * 1e3 == pytest.approx(floor_ms, rel=4e-3)


def test_fp8_halves_the_layers_and_keeps_the_head() -> None:
    eight = roofline("llama-3.1-8b", weight_bytes=1, kv_bytes=1)
    head = 128256 * 4096
    assert eight.all_weight_bytes == LLAMA.num_layer_weights + 2 * head
    assert eight.decode_s(1, 1024) * 1e3 == pytest.approx(1.883, rel=1e-3)
    assert eight.kv_s(8, 8192) == LLAMA.kv_s(8, 8192) / 2


@pytest.mark.parametrize(("length", "floor_ms"), [(1024, 18.55), (8192, 174), (32768, 1048)])
def test_a_prefill_multiplies_and_attends(length: int, floor_ms: float) -> None:
    assert LLAMA.prefill_s(1, length) * 1e3 == pytest.approx(floor_ms, rel=1e-3)
    assert LLAMA.prefill_s(16, length) == pytest.approx(16 * LLAMA.prefill_s(1, length))


def test_a_short_prefill_reads_the_weights() -> None:
    assert LLAMA.prefill_s(1, 1) >= LLAMA.num_layer_weights * 2 / 4.3e12


def test_a_prefill_at_its_floor_runs_between_the_two_rates() -> None:
    rate = LLAMA.prefill_flops(1, 8192) / LLAMA.prefill_s(1, 8192)
    assert 600e12 < rate < 790e12


def test_a_step_at_its_floor_reads_at_the_memory_rate() -> None:
    for batch, context in ((1, 1024), (32, 8192)):
        rate = LLAMA.decode_bytes(batch, context) / LLAMA.decode_s(batch, context)
        assert rate == pytest.approx(4.3e12)


def test_smaller_elements_read_faster() -> None:
    small = roofline("llama-3.1-8b", weight_bytes=1, head_bytes=1, kv_bytes=1)
    assert small.decode_s(8, 8192) == pytest.approx(LLAMA.decode_s(8, 8192) / 2)
    assert small.saturation_batch == pytest.approx(LLAMA.saturation_batch / 2)


def test_a_window_bounds_what_is_read() -> None:
    windowed = replace(LLAMA, model=replace(LLAMA.model, sliding_window=1024))
    assert windowed.decode_s(8, 8192) == LLAMA.decode_s(8, 1024)
    assert windowed.prefill_flops(1, 1024) == LLAMA.prefill_flops(1, 1024)
    assert windowed.prefill_flops(1, 8192) < LLAMA.prefill_flops(1, 8192)


def test_a_batch_is_its_prefill_and_its_steps() -> None:
    one = LLAMA.batch_s(8, 32, 1)
    assert one == LLAMA.prefill_s(8, 32)
    assert LLAMA.batch_s(8, 32, 128) > one + 127 * LLAMA.decode_s(8, 32)


def test_saturation_is_where_the_two_rates_meet() -> None:
    assert LLAMA.saturation_batch == pytest.approx(183.7, abs=0.1)
    below, above = (LLAMA.decode_s(b, 0) for b in (180, 190))
    assert below == LLAMA.decode_s(1, 0) < above


def test_steps_at_their_floor_saturate_as_predicted() -> None:
    steps = {batch: LLAMA.decode_s(batch, 1024) for batch in (1, 64, 256)}
    found = LLAMA.measured_saturation(steps, 1024)
    assert found == pytest.approx(LLAMA.saturation_batch)


@pytest.mark.parametrize("batches", [(1,), (1, 64, 128)])
def test_saturation_beyond_what_was_measured_is_unknown(batches: tuple[int, ...]) -> None:
    steps = {batch: LLAMA.decode_s(batch, 1024) for batch in batches}
    assert LLAMA.measured_saturation(steps, 1024) is None


def test_a_faster_device_has_a_lower_floor() -> None:
    fast = replace(LLAMA, hardware=Hardware(bytes_per_s=8.6e12))
    assert fast.decode_s(1, 1024) == pytest.approx(LLAMA.decode_s(1, 1024) / 2)


def test_many_requests_are_bound_by_multiplying() -> None:
    """Full steps: about 40,000 tokens of 1,024 + 128 in a second, whatever their number."""
    for count in (1, 1000):
        rate = count * 1152 / LLAMA.throughput_s(count, 1024, 128)
        assert rate == pytest.approx(44_000, rel=0.05)


def test_a_batch_reads_and_multiplies_once_a_step() -> None:
    assert LLAMA.batch_bytes(8, 32, 128) == pytest.approx(128 * LLAMA.num_weights * 2, rel=0.05)
    assert LLAMA.batch_flops(8, 32, 128) == pytest.approx(
        8 * 159 * 2 * LLAMA.num_layer_weights, rel=0.1
    )
