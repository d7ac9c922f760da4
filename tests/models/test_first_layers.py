from __future__ import annotations

import torch

from diptych.kernels.dispatch import select_ops
from diptych.models.config import ModelConfig
from diptych.models.layers import ForwardBatch, ManyQueries, layer_views
from diptych.models.llama import Decoder
from diptych.models.loader import DummyWeights
from tests.tiny_models import make_tiny_model

CPU = torch.device("cpu")


class Counted:
    """Notes which layers run."""

    def __init__(self) -> None:
        self.layers: list[int] = []

    def wait_for_layer_load(self, layer: int) -> None:
        self.layers.append(layer)

    def save_kv_layer(self, layer: int) -> None:
        pass


def test_layers_are_left_out_only_meanwhile(tmp_path) -> None:
    config = ModelConfig.from_directory(make_tiny_model(tmp_path / "m"))
    weights = DummyWeights(torch.float32, CPU, 0, config.attention_bias)
    model = Decoder(config, weights, select_ops(CPU), 64, CPU)
    heads, dim = config.num_kv_heads, config.head_dim
    kv = layer_views(torch.zeros(1, heads, config.num_layers, 2, 16, dim))
    one = torch.ones(1, dtype=torch.int32)
    many = ManyQueries(one[None] * 0, torch.tensor([0, 1], dtype=torch.int32), one, 1)
    batch = ForwardBatch(one.long(), one.long() * 0, one.long() * 0, many=many)

    def run() -> list[int]:
        counted = Counted()
        model.forward(batch, kv, counted)
        return counted.layers

    with model.only_first_layers(2):
        assert run() == [0, 1]
    assert run() == [0, 1, 2]
