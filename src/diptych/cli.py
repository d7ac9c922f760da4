"""The `diptych` command. Only what a command needs is imported: `--help` stays under a second."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from diptych.config_sources import SECTIONS, Settings, add_flags, load
from diptych.errors import DiptychError

_BENCHES = {
    "latency": "seconds of one batch",
    "throughput": "requests and tokens per second, all at once",
    "ladder": "decode and prefill over batch and context, against floor and peer",
    "mixed": "a known prefix against an unknown one; running requests while prompts arrive",
    "blocks": "KV block sizes: decode, prefill, transfers",
    "startup": "seconds until an engine is ready",
    "kernels": "each Triton kernel against its floor",
    "quality": "answers with weights and KV of eight bits, against those without",
    "kvstore": "the KV store against a copy in memory, and beside other stores",
    "prefix": "first token of a prompt whose prefix only the store has",
    "transport": "each transport between two processes, against a copy",
    "up": "start-up, memory and first token of the whole system",
    "serve": "load on an OpenAI endpoint: latencies, throughput, goodput",
}


# commands that take sections of the configuration as flags
_SERVICES: dict[str, tuple[str, tuple[str, ...]]] = {
    "up": (
        "start router, prefill, decode, KV store and directory on this machine",
        ("up", "engine", "router", "planner", "redis"),
    ),
    "serve": ("serve one model with one aggregated engine", ("up", "engine", "router")),
    "router": ("the front door", ("router", "redis", "planner", "engine")),
    "prefill": ("a prefill worker", ("worker", "engine", "redis")),
    "decode": ("a decode worker", ("worker", "engine", "redis")),
    "worker": ("an aggregated worker", ("worker", "engine", "redis")),
    "kvstore": ("a node of the KV store", ("kvstore", "redis")),
}
# what is read from the environment and a file, beyond the sections that are flags
_READS = {
    "up": ("up", "engine", "router", "planner", "redis", "kvstore", "worker"),
    "serve": ("up", "engine", "router", "planner", "redis", "worker"),
}
# of one engine on one machine: nothing is handed over, and there is nothing to choose among
_NO_EFFECT = {"serve": ("up.prefill", "up.decode", "router.handoff", "router.workers")}


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns its exit code (1: it failed with a message, 2: bad usage)."""
    _die_with_parent()
    argv = sys.argv[1:] if argv is None else argv
    args = _parser(argv).parse_args(argv)
    try:
        return int(args.run(args) or 0)
    except DiptychError as error:
        print(f"diptych: {error.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read the output has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parser(argv: list[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="diptych", description="Serve large language models with prefill and decode apart."
    )
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    for name, (text, sections) in _SERVICES.items():
        sub = commands.add_parser(name, help=text, description=text)
        add_flags(sub, *sections, without=_NO_EFFECT.get(name, ()))
        sub.set_defaults(run=_RUN[name])
        if name == "serve":
            sub.add_argument("model", nargs="?", metavar="MODEL", help="as --model")
    _add_store(commands)
    _add_chat(commands)
    _add_config(commands, argv)
    _add_doctor(commands)
    _add_bench(commands, argv)
    return parser


def _add_store(commands: Any) -> None:
    from diptych import store_admin

    store_admin.add_arguments(
        commands.add_parser("store", help="look into the KV store and tidy it")
    )


def _add_chat(commands: Any) -> None:
    chat = commands.add_parser("chat", help="talk to a running server")
    chat.add_argument(
        "--url", default="http://127.0.0.1:8000", help="where the router listens; HOST:PORT will do"
    )
    chat.add_argument("--model", help="served model; the first one if absent")
    chat.add_argument("--system", help="system message")
    chat.add_argument("--max-tokens", type=int, help="most tokens per answer")
    chat.add_argument("--temperature", type=float, default=0.0)
    chat.add_argument("--api-key", default=os.environ.get("DIPTYCH_API_KEY"))
    chat.set_defaults(run=_chat)


def _add_config(commands: Any, argv: list[str]) -> None:
    config = commands.add_parser("config", help="configuration")
    actions = config.add_subparsers(metavar="ACTION", required=True)
    text = "print the values that flags, environment and file give, all or those of a command"
    show = actions.add_parser("show", help=text, description=text)
    show.add_argument("--config", metavar="FILE", help="YAML file with one mapping per section")
    show.set_defaults(run=_config_show, sections=tuple(SECTIONS))
    of_command = show.add_subparsers(metavar="COMMAND")
    for name, (what, sections) in _SERVICES.items():
        sub = of_command.add_parser(name, help=what)
        sub.set_defaults(sections=_READS.get(name, sections))
        if argv[:2] == ["config", "show"] and name in argv:
            without = _NO_EFFECT.get(name, ())
            # --config may stand before the command too
            add_flags(sub, *sections, without=without, config_file=argparse.SUPPRESS)


def _add_doctor(commands: Any) -> None:
    text = "look at this machine: GPUs, NIXL, transports, limits, ports, Redis"
    doctor = commands.add_parser("doctor", help=text, description=text)
    add = doctor.add_argument
    add("--redis", default=None, help="redis:// URL that must answer")
    add("--ports", type=int, nargs="*", default=[8000], help="ports that must be free")
    add("--host", default="0.0.0.0", help="address that workers will listen on")
    add(
        "--transfers",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="test every transport between two processes",
    )
    add("--json", action="store_true", help="print JSON")
    doctor.set_defaults(run=_doctor)


def _add_bench(commands: Any, argv: list[str]) -> None:
    bench = commands.add_parser("bench", help="measure")
    kinds = bench.add_subparsers(metavar="KIND", required=True)
    for name, what in _BENCHES.items():
        sub = kinds.add_parser(name, help=what)
        if argv[:2] == ["bench", name]:
            module = import_module(f"diptych.bench.{name}")
            module.add_arguments(sub)
            sub.set_defaults(run=module.main)


def _settings(args: Any, *sections: str) -> Settings:
    return load(sections, vars(args), os.environ, args.config)


def _up(args: Any) -> int:
    from diptych.launcher import up

    return up.run(_settings(args, *_READS["up"]))


def _serve(args: Any) -> int:
    from diptych.launcher import up

    if args.model is not None:
        setattr(args, "engine.model", args.model)
    return up.run(_settings(args, *_READS["serve"]), aggregated=True)


def _router(args: Any) -> None:
    settings = _settings(args, "router", "redis", "planner", "engine")
    from diptych.services.router import main as router
    from diptych.services.router.planner_task import planner_background

    router.run(
        settings["router"],
        settings["redis"],
        settings["engine"],
        planner_background(settings["planner"]),
    )


def _prefill(args: Any) -> None:
    settings = _settings(args, "worker", "engine", "redis")
    from diptych.services.prefill import main as prefill

    prefill.run(settings["worker"], settings["engine"], settings["redis"])


def _decode(args: Any) -> None:
    settings = _settings(args, "worker", "engine", "redis")
    from diptych.services.decode import main as decode

    decode.run(settings["worker"], settings["engine"], settings["redis"])


def _worker(args: Any) -> None:
    settings = _settings(args, "worker", "engine", "redis")
    from diptych.worker import main as worker

    worker.run("aggregated", settings["worker"], settings["engine"], settings["redis"])


def _kvstore(args: Any) -> None:
    settings = _settings(args, "kvstore", "redis")
    from diptych.services.kvstore import main as kvstore

    kvstore.run(settings["kvstore"], settings["redis"])


def _chat(args: Any) -> int:
    from diptych import chat

    return chat.run(
        args.url,
        model=args.model,
        system=args.system,
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        api_key=args.api_key,
    )


def _doctor(args: Any) -> int:
    from diptych import doctor

    return doctor.main(args)


def _config_show(args: Any) -> int:
    import yaml

    settings = _settings(args, *args.sections)
    sys.stdout.write(yaml.safe_dump(settings.as_dict(), sort_keys=False))
    return 0


_RUN: dict[str, Callable[[Any], int | None]] = {
    "up": _up,
    "serve": _serve,
    "router": _router,
    "prefill": _prefill,
    "decode": _decode,
    "worker": _worker,
    "kvstore": _kvstore,
}


def _die_with_parent() -> None:
    """A process of the launcher gets SIGTERM when the launcher is gone, however it went."""
    if os.environ.pop("DIPTYCH_DIE_WITH_PARENT", None):
        import ctypes
        import signal

        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)


def _version() -> str:
    from diptych import __version__

    return __version__


if __name__ == "__main__":
    sys.exit(main())
