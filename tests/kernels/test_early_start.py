"""Kernels start early only where asked, and only where a GPU can."""

import pytest
import torch

early_start = pytest.importorskip("diptych.kernels.early_start")

ORDINARY = {"EARLY": False}


def test_a_launch_is_early_only_around_a_capture_on_a_gpu_that_can(monkeypatch) -> None:
    device = torch.device("cpu")
    with early_start.starting_early():
        assert early_start.early_start(device) == ORDINARY
    monkeypatch.setattr(early_start, "_can", lambda device: True)
    assert early_start.early_start(device) == ORDINARY
    with early_start.starting_early():
        assert early_start.early_start(device) == {"EARLY": True, "launch_pdl": True}
    assert early_start.early_start(device) == ORDINARY


def test_a_capture_that_fails_leaves_launches_ordinary(monkeypatch) -> None:
    monkeypatch.setattr(early_start, "_can", lambda device: True)
    with pytest.raises(RuntimeError, match="capture"), early_start.starting_early():
        raise RuntimeError("capture")
    assert early_start.early_start(torch.device("cpu")) == ORDINARY
