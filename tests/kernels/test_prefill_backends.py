"""A prefill backend serves only where it fits and a check at start finds it right."""

import sys
from types import SimpleNamespace

import pytest
import torch

from diptych.errors import ConfigError
from diptych.kernels import reference
from diptych.kernels.attention_spec import (
    AttentionSpec,
    UnfitBackendError,
    WrongBackendError,
)
from diptych.kernels.dispatch import select_ops
from diptych.kernels.fa3_prefill_attention import MODULE, Fa3Prefill
from diptych.kernels.prefill_check import check_prefill

backends = pytest.importorskip("diptych.kernels.prefill_backends")

CPU = torch.device("cpu")
BF16 = AttentionSpec(torch.bfloat16, torch.bfloat16, 8, 2, 64, 16)


def flash_attn_with_kvcache(q, k_cache, v_cache, **options) -> torch.Tensor:
    """What the package documents, by the reference: caches `[pages, slots, heads, D]`; a window
    counts the keys before the query's own."""
    left, right = options["window_size"]
    assert (left >= 0) == (right == 0)
    assert options["causal"]
    return reference.paged_prefill_attention(
        q,
        k_cache.transpose(1, 2),
        v_cache.transpose(1, 2),
        options["page_table"],
        options["cu_seqlens_q"],
        options["cache_seqlens"],
        options["softmax_scale"],
        left + 1,
    )


@pytest.fixture
def hopper(monkeypatch) -> torch.device:
    """A device that says it is one, and the package's interface."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    module = SimpleNamespace(flash_attn_with_kvcache=flash_attn_with_kvcache)
    monkeypatch.setitem(sys.modules, MODULE, module)
    return torch.device("cuda")


@pytest.mark.parametrize("window", [0, 50])
def test_fa3_is_asked_for_what_the_reference_means(hopper, window) -> None:
    spec = AttentionSpec(torch.bfloat16, torch.bfloat16, 4, 2, 64, 16, window)
    check_prefill(Fa3Prefill(spec, hopper), spec, CPU)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (AttentionSpec(torch.float32, torch.float32, 8, 2, 64, 16), "bfloat16 or float16"),
        (AttentionSpec(torch.bfloat16, torch.float8_e4m3fn, 8, 2, 64, 16), "float8_e4m3fn"),
        (AttentionSpec(torch.bfloat16, torch.bfloat16, 8, 2, 80, 16), "not 80"),
    ],
)
def test_fa3_names_what_it_cannot_do(hopper, spec, reason) -> None:
    with pytest.raises(UnfitBackendError, match=reason):
        Fa3Prefill(spec, hopper)


def test_a_missing_package_is_named_with_its_extra(hopper, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, MODULE, None)
    with pytest.raises(UnfitBackendError, match=r"pip install 'diptych\[fa3\]'"):
        Fa3Prefill(BF16, hopper)


def test_fa3_that_is_forced_and_cannot_serve_ends_the_start(monkeypatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ConfigError, match="attention_backend fa3 cannot serve: it needs a Hopper"):
        select_ops(CPU, "fa3", BF16)
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ConfigError, match="attention_backend fa3 needs a GPU"):
        select_ops(CPU, "fa3", BF16)


@pytest.mark.parametrize("name", ["auto", "triton"])
def test_where_no_other_fits_the_kernel_that_takes_any_serves(device, name) -> None:
    spec = AttentionSpec(torch.float32, torch.float32, 6, 2, 80, 32)
    attend = backends.choose_prefill(device, name, spec)
    assert attend is backends.paged_prefill_attention
    check_prefill(attend, spec, device)


@pytest.mark.parametrize("fault", ["sees the next key", "forgets the window", "raises"])
def test_the_check_at_start_refuses_a_backend_that_is_wrong(device, fault) -> None:
    def attend(q, k, v, tables, starts, lengths, scale, window, longest) -> torch.Tensor:
        if fault == "raises":
            raise RuntimeError("no kernel image")
        if fault == "sees the next key":
            lengths = torch.where(lengths == 300, 301, lengths)
        args = (q, k, v, tables, starts, lengths, scale)
        return reference.paged_prefill_attention(*args, 0 if "window" in fault else window)

    spec = AttentionSpec(torch.bfloat16, torch.bfloat16, 8, 2, 64, 16, sliding_window=50)
    with pytest.raises(WrongBackendError, match=r"it fails: no kernel|it differs"):
        check_prefill(attend, spec, device)
