import gc
from collections.abc import Iterator

import pytest

from diptych.engine.frozen_garbage import frozen_garbage


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.unfreeze()


def test_what_was_there_is_frozen_meanwhile_and_thawed_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), frozen_garbage():  # noqa: PT012 (what is tested)
        assert gc.get_freeze_count() > 1000
        raise ZeroDivisionError
    assert gc.get_freeze_count() == 0


def test_new_garbage_is_still_collected() -> None:
    with frozen_garbage():
        ring: list[object] = []
        ring.append(ring)
        del ring
        assert gc.collect() >= 1


def test_what_others_have_frozen_stays_so() -> None:
    gc.freeze()
    with frozen_garbage():
        pass
    assert gc.get_freeze_count() > 1000
