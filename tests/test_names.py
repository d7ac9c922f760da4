import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("name", ["kernels", "proto", "services"])
def test_a_top_level_folder_is_no_top_level_package(name: str) -> None:
    spec = importlib.util.find_spec(name)
    places = spec.submodule_search_locations or [] if spec else []
    assert not [place for place in places if Path(place).resolve().is_relative_to(ROOT)]
