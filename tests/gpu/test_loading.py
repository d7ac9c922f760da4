"""Weights that stream to a GPU through pinned buffers are those of the files."""

from __future__ import annotations

import torch

from diptych.models.config import ModelConfig
from diptych.models.loader import SafetensorsWeights
from diptych.models.staged_copy import StagedCopy
from tests.tiny_models import make_tiny_model


class Pattern:
    """Byte `i` is `i % 251`."""

    def read_into(self, buffer: memoryview, start: int) -> None:
        buffer[:] = bytes(i % 251 for i in range(start, start + len(buffer)))


def test_pieces_come_in_their_places_while_buffers_are_used_again() -> None:
    copy = StagedCopy(torch.device("cuda", 0), buffer_bytes=1000)
    for size in (1, 999, 1000, 1001, 123_456):
        target = torch.zeros(size, dtype=torch.uint8, device="cuda")
        copy.read(Pattern(), 7, target)
        expected = (torch.arange(7, 7 + size) % 251).to(torch.uint8)
        assert torch.equal(target.cpu(), expected)
    copy.close()


def test_a_gpu_loads_what_a_cpu_loads(tmp_path) -> None:
    model = make_tiny_model(tmp_path / "m")
    config = ModelConfig.from_directory(model)
    names = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
    rows = [config.num_heads * config.head_dim] + [config.num_kv_heads * config.head_dim] * 2
    for dtype in (torch.float32, torch.bfloat16):
        loaded = []
        for device in ("cpu", "cuda:0"):
            with SafetensorsWeights(model, dtype, torch.device(device)) as weights:
                loaded.append(weights.load(names, rows, config.hidden_size).cpu())
        assert torch.equal(*loaded)
