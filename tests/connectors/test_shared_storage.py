"""Files are whole or absent, and a consumer finds the longest stored prefix without a message."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from diptych.config import EngineConfig, KVTransferConfig
from diptych.connectors.factory import make_scheduler_connector, make_worker_connector
from diptych.connectors.page_orders import Outgoing
from diptych.connectors.page_worker import PageConnectorWorker
from diptych.connectors.shared_storage import FileStore, SharedStorageScheduler
from diptych.errors import ConfigError
from tests.connectors.fakes import NAMESPACE, Request, make_cache, make_layout, same_kv

BLOCKS = list(range(30, 0, -1))
PROMPT = list(range(2000, 2150))
KEY = b"k" * 32


def outgoing(data: bytes) -> Outgoing:
    return Outgoing(KEY, len(data), lambda view: view.__setitem__(slice(None), data))


def config(path: Path, role: str = "kv_both", **extra: object) -> EngineConfig:
    return EngineConfig(
        kv_transfer_config=KVTransferConfig(
            kv_connector="SharedStorageConnector",
            kv_role=role,
            kv_connector_extra_config={"shared_storage_path": str(path), **extra},
        )
    )


class Offline:
    """The connector of one offline engine, as the factory makes it."""

    def __init__(self, path: Path, role: str = "kv_both", seed: int | None = None) -> None:
        layout = make_layout(16)
        self.cache = make_cache(layout, seed)
        scheduler = make_scheduler_connector(config(path, role), layout, NAMESPACE)
        worker = make_worker_connector(config(path, role))
        assert isinstance(scheduler, SharedStorageScheduler)
        assert isinstance(worker, PageConnectorWorker)
        self.scheduler, self.worker = scheduler, worker
        self.worker.register_kv_caches(self.cache, layout)

    def compute(self, tokens: list[int]) -> None:
        request = Request("p", tokens)
        meta = self.scheduler.build_connector_meta({"p": (request, BLOCKS, len(tokens))})
        self.worker.wait_for_save(meta)
        assert not self.scheduler.request_finished(request, BLOCKS), "files are written already"

    def match(self, tokens: list[int], num_local_tokens: int = 0) -> int:
        request = Request(f"m{time.monotonic_ns()}", tokens)
        return self.scheduler.get_num_new_matched_tokens(request, num_local_tokens)[0]

    def load(self, tokens: list[int]) -> dict[str, int]:
        """Load what matches; returns the failures."""
        request = Request("c", tokens)
        found, _ = self.scheduler.get_num_new_matched_tokens(request, 0)
        self.scheduler.update_state_after_alloc(request, BLOCKS, found)
        self.worker.start_load_kv(self.scheduler.build_connector_meta({}))
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            output = self.worker.get_finished()
            if "c" in output.finished_recving:
                return output.failed_recving
            time.sleep(0.002)
        raise AssertionError("the load does not end")


@pytest.mark.parametrize(
    ("asked", "matched"),
    [
        (PROMPT, 149),
        ([*PROMPT, 1, 2], 150),
        (PROMPT[:128], 127),
        (PROMPT[:140], 128),
        ([*PROMPT[:100], 1, 2, 3], 64),
        ([9, *PROMPT], 0),
        (PROMPT[:1], 0),
    ],
    ids=["equal", "longer", "pages", "shorter-tail", "branch", "other", "one"],
)
def test_a_consumer_finds_the_longest_stored_prefix(
    tmp_path: Path, asked: list[int], matched: int
) -> None:
    engine = Offline(tmp_path, seed=1)
    engine.compute(PROMPT)
    assert engine.match(asked) == matched
    engine.worker.shutdown()


def test_what_the_prefix_cache_has_is_not_looked_up(tmp_path: Path) -> None:
    engine = Offline(tmp_path, seed=1)
    engine.compute(PROMPT)
    assert engine.match(PROMPT, 80) == 69
    assert engine.match(PROMPT, 144) == 5
    engine.worker.shutdown()


def test_the_consumer_gets_the_producers_kv(tmp_path: Path) -> None:
    one, two = Offline(tmp_path, "kv_producer", seed=1), Offline(tmp_path, "kv_consumer")
    one.compute(PROMPT)
    assert two.load(PROMPT) == {}
    assert same_kv((one.cache, BLOCKS), (two.cache, BLOCKS), 0, 149)
    one.worker.shutdown()
    two.worker.shutdown()


def test_roles_are_kept(tmp_path: Path) -> None:
    one, two = Offline(tmp_path, "kv_producer", seed=1), Offline(tmp_path, "kv_consumer", seed=2)
    two.compute(PROMPT)
    assert not list(tmp_path.rglob("*.kv"))
    one.compute(PROMPT)
    assert one.match(PROMPT) == 0
    assert two.match(PROMPT) == 149
    one.worker.shutdown()
    two.worker.shutdown()


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "longer", "header", "swap"])
def test_a_damaged_file_is_recomputed_and_written_anew(tmp_path: Path, damage: str) -> None:
    one, two = Offline(tmp_path, seed=1), Offline(tmp_path)
    one.compute(PROMPT)
    store = FileStore(tmp_path)
    path = store.path(Request("x", PROMPT).prefix_hash(128))
    raw = path.read_bytes()
    swapped = store.path(Request("x", PROMPT).prefix_hash(64)).read_bytes()
    path.write_bytes(
        {
            "flip": raw[:-9] + bytes([raw[-9] ^ 4]) + raw[-8:],
            "truncate": raw[:-1],
            "empty": b"",
            "longer": raw + b"\0",
            "header": raw[:40] + b"\1" + raw[41:],
            "swap": swapped,
        }[damage]
    )
    failed = two.load(PROMPT)
    # a bad payload shows when it is read, the rest when it is looked up
    assert failed == ({"c": 64} if damage == "flip" else {})
    assert same_kv((one.cache, BLOCKS), (two.cache, BLOCKS), 0, 64)
    assert not two.cache[BLOCKS[4]].any()
    one.compute(PROMPT)
    assert path.read_bytes() == raw
    one.worker.shutdown()
    two.worker.shutdown()


def test_a_put_leaves_no_other_files_and_an_existing_object_stays(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    first = store.put_many([outgoing(b"one")])
    assert store.put_many([outgoing(b"two")]) == first
    taken: list[bytes] = []
    assert store.get_many([(KEY, 3)], lambda i, view: taken.append(bytes(view))) == first
    assert taken == [b"one"]
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == [f"{KEY.hex()}.kv"]


def test_a_get_of_another_size_or_an_absent_key_is_a_miss(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    store.put_many([outgoing(b"one")])
    assert store.get_many([(KEY, 4), (b"x" * 32, 3)], pytest.fail) == [None, None]


def test_a_disk_that_refuses_costs_the_save_only(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    (tmp_path / KEY.hex()[:2]).write_text("in the way")
    assert store.put_many([outgoing(b"one")]) == [None]


@pytest.mark.parametrize(
    ("connector", "extra", "message"),
    [
        ("NoSuchConnector", {}, "NoSuchConnector"),
        ("SharedStorageConnector", {}, "shared_storage_path"),
        ("SharedStorageConnector", {"shared_storage_path": 3}, "shared_storage_path"),
        ("SharedStorageConnector", {"shared_storage_path": "x", "speed": 1}, "speed"),
        ("SharedStorageConnector", {"shared_storage_path": "x", "retry_s": "1"}, "retry_s"),
        ("SharedStorageConnector", {"shared_storage_path": "x", "retry_s": 0}, "retry_s"),
        ("SharedStorageConnector", {"shared_storage_path": "/dev/null/x"}, "/dev/null/x"),
    ],
)
def test_a_bad_setting_is_named(connector: str, extra: dict[str, object], message: str) -> None:
    bad = EngineConfig(
        kv_transfer_config=KVTransferConfig(kv_connector=connector, kv_connector_extra_config=extra)
    )
    with pytest.raises(ConfigError, match=message):  # noqa: PT012 - either half may be the one
        make_worker_connector(bad)
        make_scheduler_connector(bad, make_layout(16), NAMESPACE)


def test_without_a_connector_there_are_no_halves() -> None:
    for transfer in (None, KVTransferConfig()):
        plain = EngineConfig(kv_transfer_config=transfer)
        assert make_scheduler_connector(plain, make_layout(16), NAMESPACE) is None
        assert make_worker_connector(plain) is None
