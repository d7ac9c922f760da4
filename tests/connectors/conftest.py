"""Engines of a tiny model around a store node, for the tests that ask for them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.connectors.store_engines import MakeCore, making_cores
from tests.services.test_kvstore import Node, running_node
from tests.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def node() -> Iterator[Node]:
    with running_node(pool_bytes=64 << 20) as node:
        yield node


@pytest.fixture
def make_core(model: Path) -> Iterator[MakeCore]:
    with making_cores(model) as make:
        yield make
