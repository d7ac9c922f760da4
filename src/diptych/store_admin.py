"""`diptych store`: what an operator asks of the store's nodes, and tells them."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from diptych.errors import ConfigError, InvalidRequestError, TransferError, UnavailableError

if TYPE_CHECKING:
    from diptych.connectors.store_client import StoreClient
    from diptych.connectors.store_cluster import StoreCluster, StoreNode
    from diptych.registry import Registry, StoreRecord

T = TypeVar("T")

_TIMEOUT_S = 10.0
_CHECK_S = 120.0
_PAGE = 4096
# A check reads every byte: a few at a time keep each call short.
_CHECK_BATCH = 64
_LEVELS = {"none": "PIN_LEVEL_NONE", "soft": "PIN_LEVEL_SOFT", "hard": "PIN_LEVEL_HARD"}
_COLUMNS = {
    "objects": "num_objects",
    "used": "used_bytes",
    "pool": "pool_bytes",
    "on disk": "num_disk_objects",
    "disk used": "disk_used_bytes",
    "hits": "hits_total",
    "misses": "misses_total",
    "evicted": "evictions_total",
    "corrupt": "corrupt_total",
}


def add_arguments(store: argparse.ArgumentParser) -> None:
    """The actions and their flags."""
    actions = store.add_subparsers(metavar="ACTION", required=True)

    def action(name: str, text: str) -> argparse.ArgumentParser:
        sub = actions.add_parser(name, help=text, description=text)
        sub.add_argument(
            "--kvstore",
            default=os.environ.get("DIPTYCH_KVSTORE"),
            help="host:port of the nodes, comma-separated",
        )
        sub.add_argument(
            "--redis",
            default=os.environ.get("DIPTYCH_REDIS"),
            help="redis:// URL of the registry that knows the nodes",
        )
        sub.add_argument("--registry-prefix", default="diptych", help="prefix of its keys")
        sub.set_defaults(run=run, action=name)
        return sub

    ls = action("ls", "list objects: node, key, bytes, tier")
    ls.add_argument("--limit", type=int, default=1000, help="most objects; 0: all")
    find = action("find", "where objects are, as the directory in Redis has it")
    find.add_argument("keys", nargs="+", metavar="KEY", help="in hex")
    stats = action("stats", "what each node holds and has done")
    stats.add_argument("--json", action="store_true", help="all counters, one object a node")
    evict = action("evict", "remove objects from all nodes and tiers")
    evict.add_argument("keys", nargs="*", metavar="KEY", help="in hex")
    evict.add_argument("--all", action="store_true", help="everything")
    verify = action("verify", "read objects again, in memory and on disk; remove what is damaged")
    verify.add_argument("keys", nargs="*", metavar="KEY", help="in hex; all if absent")
    pin = action("pin", "keep objects in memory, or let them go again")
    pin.add_argument("keys", nargs="+", metavar="KEY", help="in hex")
    pin.add_argument("--level", choices=list(_LEVELS), default="soft", help="hard: never evicted")


def run(args: argparse.Namespace) -> int:
    """Do one action on all nodes; 1 where a node did not answer, something was damaged, or an
    object that was named is not there."""
    from diptych.connectors.store_cluster import FixedNodes, StoreCluster  # not for the help

    if not (args.kvstore or args.redis):
        raise ConfigError("name the store with --kvstore HOST:PORT or --redis URL")
    if args.action == "find":
        return _find(args)
    cluster = StoreCluster(FixedNodes(_nodes(args)), timeout_s=_TIMEOUT_S)
    try:
        return _ACTIONS[args.action](cluster, args)
    finally:
        cluster.close()


def _nodes(args: argparse.Namespace) -> list[str | StoreNode]:
    """Addresses, or what the registry says once: who asks once needs no watch.

    Raises:
        UnavailableError: Redis does not answer, or knows no node.
        ConfigError: what is named cannot be an address, or a Redis.
    """
    import asyncio

    from diptych.config_checks import check_address
    from diptych.connectors.store_cluster import StoreNode

    if args.kvstore:
        addresses = [address.strip() for address in args.kvstore.split(",")]
        for address in addresses:
            check_address("--kvstore", address)
        return list(addresses)
    records = asyncio.run(_with_registry(args, _registered))
    if not records:
        raise UnavailableError("no node of the KV store is registered")
    return [StoreNode(id_, record.address) for id_, record in records.items()]


async def _with_registry(
    args: argparse.Namespace, ask: Callable[[Registry], Coroutine[Any, Any, T]]
) -> T:
    from diptych.config import RedisConfig
    from diptych.registry import Registry

    config = RedisConfig(redis=args.redis, registry_prefix=args.registry_prefix)
    registry = Registry(config)
    try:
        return await ask(registry)
    finally:
        await registry.close()


async def _registered(registry: Registry) -> dict[str, StoreRecord]:
    from diptych.registry import StoreRecord

    return (await registry.members(StoreRecord)).records


def _stats(cluster: StoreCluster, args: argparse.Namespace) -> int:
    from diptych.proto import kvstore_pb2 as pb

    rows, failed = [], 0
    for node_id, client in _clients(cluster).items():
        try:
            stats = client.ask("GetStats", pb.GetStatsRequest())
        except TransferError as error:
            failed = _complain(error)
            continue
        if args.json:
            values = {f.name: getattr(stats, f.name) for f in stats.DESCRIPTOR.fields}
            values["tenant_bytes"] = dict(stats.tenant_bytes)
            _say(json.dumps({"node": node_id, **values}))
        else:
            rows.append([node_id, *(str(getattr(stats, f)) for f in _COLUMNS.values())])
    if rows:
        _table([["node", *_COLUMNS], *rows])
    return failed


def _find(args: argparse.Namespace) -> int:
    """One line for every holder of every key; 1 where a key has none."""
    import asyncio

    from diptych.services.kvstore.directory import Directory, Holder

    if not args.redis:
        raise ConfigError("the directory is in Redis: name it with --redis URL")
    keys = _keys(args)

    async def look_up(registry: Registry) -> list[list[Holder]]:
        nodes = sorted(await _registered(registry))
        return await Directory(registry.redis).lookup(nodes, keys)

    missing = 0
    for key, holders in zip(keys, asyncio.run(_with_registry(args, look_up)), strict=True):
        if not holders:
            missing += 1
            sys.stderr.write(f"no node has {key.hex()}\n")
        for holder in holders:
            _say(f"{holder.node_id} {key.hex()} {holder.num_bytes} {holder.tier}")
    return int(missing > 0)


def _ls(cluster: StoreCluster, args: argparse.Namespace) -> int:
    count = failed = 0
    for node_id, client in _clients(cluster).items():
        try:
            for item in _objects(client):
                if args.limit and count == args.limit:
                    sys.stderr.write(f"only the first {count}; see --limit\n")
                    return failed
                count += 1
                _say(f"{node_id} {item.key.hex()} {item.num_bytes} {item.tier}")
        except TransferError as error:
            failed = _complain(error)
    return failed


def _evict(cluster: StoreCluster, args: argparse.Namespace) -> int:
    from diptych.proto import kvstore_pb2 as pb

    if bool(args.keys) == args.all:
        raise ConfigError("name the KEYs to evict, or --all")
    keys = _keys(args)
    missing = set(keys)
    request = pb.EvictRequest(keys=keys, all=args.all)
    removed = failed = 0
    for client in _clients(cluster).values():
        try:
            if keys:
                present = client.exists_many(keys)
                missing -= {key for key, there in zip(keys, present, strict=True) if there}
            removed += client.ask("Evict", request).num_objects
        except TransferError as error:
            failed = _complain(error)
    _say(f"{removed} objects removed")
    return failed | _miss(keys, missing)


def _verify(cluster: StoreCluster, args: argparse.Namespace) -> int:
    named = _keys(args)
    missing = set(named)
    whole = damaged = failed = 0
    for node_id, client in _clients(cluster).items():
        try:
            keys = named or [item.key for item in _objects(client)]
            for start in range(0, len(keys), _CHECK_BATCH):
                good, bad = _check(client, keys[start : start + _CHECK_BATCH])
                missing -= {*good, *bad}
                whole += len(good)
                damaged += len(bad)
                for key in bad:
                    _say(f"{node_id} {key.hex()} had a damaged copy, which is removed")
        except TransferError as error:
            failed = _complain(error)
    _say(f"{whole} objects are whole, {damaged} were damaged")
    return failed | int(damaged > 0) | _miss(named, missing)


def _check(client: StoreClient, keys: list[bytes]) -> tuple[list[bytes], list[bytes]]:
    """Which objects are whole, and which were damaged; what is not there is in neither."""
    from diptych.proto import kvstore_pb2 as pb

    request = pb.CheckRequest(keys=keys)
    statuses = client.ask_each("Check", request, "statuses", len(keys), _CHECK_S)
    pairs = list(zip(keys, statuses, strict=True))
    whole = [key for key, status in pairs if status == pb.ITEM_STATUS_OK]
    return whole, [key for key, status in pairs if status == pb.ITEM_STATUS_INVALID]


def _pin(cluster: StoreCluster, args: argparse.Namespace) -> int:
    from diptych.proto import kvstore_pb2 as pb

    keys = _keys(args)
    missing = set(keys)
    request = pb.PinRequest(keys=keys, level=getattr(pb, _LEVELS[args.level]))
    pinned = refused = failed = 0
    for client in _clients(cluster).values():
        try:
            statuses = client.ask_each("Pin", request, "statuses", len(keys))
        except TransferError as error:
            failed = _complain(error)
            continue
        pairs = zip(keys, statuses, strict=True)
        missing -= {key for key, status in pairs if status != pb.ITEM_STATUS_NOT_FOUND}
        pinned += sum(status == pb.ITEM_STATUS_OK for status in statuses)
        refused += sum(status == pb.ITEM_STATUS_NO_SPACE for status in statuses)
    _say(f"{pinned} copies set to {args.level}" + (f", {refused} beyond the bound" * bool(refused)))
    return failed | int(refused > 0) | _miss(keys, missing, " in memory")


def _miss(keys: list[bytes], missing: set[bytes], where: str = "") -> int:
    """A line for each of the keys that no node has; 1 where there is one."""
    for key in dict.fromkeys(keys):
        if key in missing:
            sys.stderr.write(f"not found{where}: {key.hex()}\n")
    return int(bool(missing))


def _clients(cluster: StoreCluster) -> dict[str, StoreClient]:
    return dict(sorted(cluster.clients().items()))


def _objects(client: StoreClient) -> Iterator[Any]:
    from diptych.proto import kvstore_pb2 as pb

    after = b""
    while page := client.ask("List", pb.ListRequest(after=after, limit=_PAGE)).objects:
        if page[-1].key <= after:
            raise TransferError(f"the KV store at {client.address} lists the same objects again")
        yield from page
        after = page[-1].key


def _keys(args: argparse.Namespace) -> list[bytes]:
    from diptych.hashing import HASH_BYTES  # brings numpy

    keys = []
    for text in args.keys:
        try:
            key = bytes.fromhex(text)
        except ValueError:
            key = b""
        if len(key) != HASH_BYTES:
            raise InvalidRequestError(
                f"{text!r} is no key: {2 * HASH_BYTES} hex digits", param="KEY"
            )
        keys.append(key)
    return keys


def _table(rows: list[list[str]]) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        _say("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


def _complain(error: TransferError) -> int:
    sys.stderr.write(f"{error.message}\n")
    return 1


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")


_ACTIONS = {"ls": _ls, "stats": _stats, "evict": _evict, "verify": _verify, "pin": _pin}
