"""`diptych store` against real nodes."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from diptych.cli import main
from diptych.config import RedisConfig
from diptych.connectors.store_client import StoreClient
from diptych.connectors.store_membership import RegistryNodes
from diptych.connectors.store_results import PutItem
from diptych.embedded_redis import EmbeddedRedis
from diptych.errors import ConfigError
from tests.services.test_kvstore import Node, key, patient, put, running_node

Out = pytest.CaptureFixture[str]


@pytest.fixture
def node() -> Iterator[Node]:
    with running_node() as node:
        yield node


@pytest.fixture
def client(node: Node) -> Iterator[StoreClient]:
    client = patient(node.address, transport="memory")
    yield client
    client.close()


def store(node: Node, *arguments: str) -> int:
    return main(["store", *arguments, "--kvstore", node.address])


def test_objects_are_listed_pinned_and_removed(
    node: Node, client: StoreClient, capsys: Out
) -> None:
    objects = {key(): os.urandom(1000 + i) for i in range(5)}
    put(client, objects)
    assert store(node, "ls") == 0
    listed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [(k, n, tier) for _, k, n, tier in listed] == [
        (name.hex(), str(len(objects[name])), "dram") for name in sorted(objects)
    ]
    assert store(node, "ls", "--limit", "2") == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    first, *rest = objects
    assert store(node, "pin", first.hex(), "--level", "hard") == 0
    assert store(node, "evict", rest[0].hex()) == 0
    assert "1 objects removed" in capsys.readouterr().out
    assert client.exists_many(list(objects)) == [True, False, True, True, True]
    assert store(node, "evict", "--all") == 0
    assert client.exists_many(list(objects)) == [False] * 5


def test_verify_finds_what_is_damaged_and_removes_it(
    node: Node, client: StoreClient, capsys: Out
) -> None:
    kept: list[memoryview] = []

    def write(view: memoryview) -> None:
        view[:] = b"right!"
        kept.append(view[:])

    good, bad = key(), key()
    put(client, {good: b"fine"})
    client.put_many([PutItem(bad, 6, write)])
    assert store(node, "verify") == 0
    kept[0][:] = b"wrong!"
    capsys.readouterr()
    assert store(node, "verify") == 1
    assert capsys.readouterr().out.splitlines()[-1] == "1 objects are whole, 1 were damaged"
    assert client.exists_many([good, bad]) == [True, False]
    kept.clear()


def test_stats_are_a_table_or_json(node: Node, client: StoreClient, capsys: Out) -> None:
    put(client, {key(): b"x" * 100})
    assert store(node, "stats") == 0
    header, row = capsys.readouterr().out.splitlines()
    assert header.split()[:2] == ["node", "objects"]
    assert row.split()[:2] == [node.address, "1"]
    assert store(node, "stats", "--json") == 0
    stats = json.loads(capsys.readouterr().out)
    assert (stats["puts_total"], stats["tenant_bytes"]) == (1, {"": 4096})


def test_find_asks_the_directory(capsys: Out) -> None:
    with EmbeddedRedis() as url, ExitStack() as stack:
        redis: dict[str, object] = {"redis": url, "heartbeat_s": 0.05}
        for name in ("a", "b"):
            node = stack.enter_context(running_node(redis=redis, node_id=name))
            node.until_ready()
        client = patient(node.address)
        stored, unknown = key(), key()
        put(client, {stored: b"x" * 100})
        client.close()

        def find(name: bytes) -> int:
            return main(["store", "find", name.hex(), "--redis", url])

        deadline = time.monotonic() + 60
        while find(stored):
            assert time.monotonic() < deadline
        assert capsys.readouterr().out == f"b {stored.hex()} 100 dram\n"
        assert main(["store", "stats", "--redis", url]) == 0
        rows = [line.split() for line in capsys.readouterr().out.splitlines()]
        assert [row[:2] for row in rows[1:]] == [["a", "0"], ["b", "1"]]
        assert find(unknown) == 1
        captured = capsys.readouterr()
        assert (captured.out, captured.err) == ("", f"no node has {unknown.hex()}\n")


@pytest.mark.parametrize("action", ["evict", "verify", "pin"])
def test_an_object_that_no_node_has_is_named(
    node: Node, client: StoreClient, capsys: Out, action: str
) -> None:
    there, unknown = key(), key()
    put(client, {there: b"bytes"})
    assert store(node, action, there.hex(), unknown.hex()) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("not found")
    assert unknown.hex() in captured.err
    assert there.hex() not in captured.err
    assert captured.out.startswith("1 ")


def test_what_is_no_address_is_refused_before_anything_is_asked(capsys: Out) -> None:
    assert main(["store", "stats", "--kvstore", "foo"]) == 1
    assert capsys.readouterr().err == "diptych: --kvstore must be host:port, not 'foo'\n"
    assert main(["store", "stats", "--redis", "foo"]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("diptych: bad Redis URL (no URL): ")
    with pytest.raises(ConfigError, match="bad Redis URL"):
        RegistryNodes(RedisConfig(redis="foo"))


@pytest.mark.parametrize("frozen", [False, True])
def test_a_redis_that_does_not_answer_says_nothing_of_nodes(capsys: Out, frozen: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1] if frozen else 1
        assert main(["store", "stats", "--redis", f"redis://127.0.0.1:{port}"]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert f"Redis at redis://127.0.0.1:{port} does not answer" in line


def test_a_registry_without_a_node_is_named(capsys: Out) -> None:
    with EmbeddedRedis() as url:
        assert main(["store", "stats", "--redis", url]) == 1
    assert "no node of the KV store is registered" in capsys.readouterr().err


def test_what_cannot_be_done_is_said(node: Node, capsys: Out) -> None:
    assert store(node, "evict") == 1
    assert store(node, "evict", "abc") == 1
    assert main(["store", "stats"]) == 1
    node.process.kill()
    node.process.wait()
    assert store(node, "stats") == 1
    assert "does not answer" in capsys.readouterr().err
