"""What a captured decode step uploads: the rows that the device does not have, and no more."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from diptych.engine.pinned import Uploads
from diptych.engine.resident_rows import DecodeRows, ResidentRows, RowMirror
from diptych.kernels.dispatch import select_ops
from diptych.sampling_params import SamplingParams
from tests.engine.test_graphs import CapturedDriver
from tests.tiny_models import make_tiny_model

CPU = torch.device("cpu")


def rows_of(rows: list[int], positions: list[int], entries: list[int] | None = None) -> DecodeRows:
    """Rows with known tokens: ten times their number."""
    at = np.array(rows)
    return DecodeRows(
        rows=at,
        entries=np.array(entries or [1] * len(rows)),
        input_ids=10 * at,
        positions=np.array(positions),
        prompt_lens=at + 1,
    )


def uploaded(mirror: RowMirror, step: DecodeRows) -> tuple[bool, list[int]]:
    """Whether the order is, and which rows are."""
    upload = mirror.advance(step)
    return upload.order is not None, step.rows[upload.stale].tolist()


def test_the_same_rows_one_token_on_need_nothing() -> None:
    mirror = RowMirror(8)
    assert uploaded(mirror, rows_of([3, 1], [5, 9])) == (True, [3, 1])
    for i in range(1, 4):
        assert uploaded(mirror, rows_of([3, 1], [5 + i, 9 + i])) == (False, [])


def test_one_that_joins_is_written_alone() -> None:
    mirror = RowMirror(8)
    mirror.advance(rows_of([3, 1], [5, 9]))
    assert uploaded(mirror, rows_of([3, 1, 0], [6, 10, 20])) == (True, [0])


def test_when_one_leaves_only_the_order_changes() -> None:
    mirror = RowMirror(8)
    mirror.advance(rows_of([3, 1, 0], [5, 9, 2]))
    upload = mirror.advance(rows_of([3, 0], [6, 3]))
    assert upload.order is not None
    assert upload.order.tolist() == [3, 0, *[-1] * 6]
    assert not len(upload.stale)
    assert uploaded(mirror, rows_of([3, 0], [7, 4])) == (False, [])


def test_a_row_that_another_step_moved_is_written_again() -> None:
    mirror = RowMirror(8)
    mirror.advance(rows_of([3, 1], [5, 9]))
    # a step beside prompts has computed position 10 of row 1, and 3 waited
    assert uploaded(mirror, rows_of([3, 1], [6, 11])) == (False, [1])


def test_a_row_of_another_request_at_the_same_position_is_written() -> None:
    mirror = RowMirror(8)
    mirror.advance(rows_of([3, 1], [5, 9], entries=[1, 1]))
    assert uploaded(mirror, rows_of([3, 1], [6, 10], entries=[1, 2])) == (False, [1])


def test_a_row_that_paused_is_as_it_was() -> None:
    mirror = RowMirror(8)
    mirror.advance(rows_of([3, 1], [5, 9]))
    mirror.advance(rows_of([3], [6]))
    assert uploaded(mirror, rows_of([3, 1], [7, 10])) == (True, [])


def test_what_is_uploaded_is_on_the_device() -> None:
    last_tokens = torch.arange(100, 108)
    resident = ResidentRows(last_tokens, select_ops(CPU), Uploads(CPU))
    step = rows_of([3, 1], [5, 9])
    step.input_ids[1] = -1  # the device sampled it
    resident.load(step)
    assert resident.order.tolist() == [3, 1, *[-1] * 6]
    assert last_tokens[[3, 1, 0]].tolist() == [30, 101, 100]
    assert resident.positions[[3, 1]].tolist() == [5, 9]
    assert resident.prompt_lens[[3, 1]].tolist() == [4, 2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "m")


def test_a_steady_step_uploads_nothing_but_new_blocks(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = CapturedDriver(model)
    for i in range(5):
        driver.add(f"{i}", [7 + i, 8, 9], SamplingParams(temperature=0.7 * (i % 2), seed=i))
    step = {f"{i}": 1 for i in range(5)}
    driver.step(dict.fromkeys(step, 3))
    uploads: list[int] = []
    put_all = Uploads.put_all

    def counted(self: Uploads, *arrays: np.ndarray) -> list[torch.Tensor]:
        uploads.append(len(arrays))
        return put_all(self, *arrays)

    monkeypatch.setattr(Uploads, "put_all", counted)
    driver.step(step)
    assert len(uploads) == 2  # the order, the rows
    for _ in range(40):
        driver.step(step)
    assert len(uploads) == 2
    driver.finish("2")
    del step["2"]
    driver.step(step)
    driver.step(step)
    assert len(uploads) == 3
