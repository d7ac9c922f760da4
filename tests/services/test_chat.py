"""`diptych chat` in a pipe: answers to standard output, errors as lines, never a traceback."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from diptych.chat import server_root
from tests.services.fake_worker import AGGREGATED, FakeWorker
from tests.services.router_fixture import ANSWER, running_router, tiny_directory, tiny_script

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_directory(tmp_path_factory.mktemp("chat"))


async def chat(typed: bytes, *argv: str) -> tuple[int | None, str, str]:
    """Exit code, standard output and standard error of one conversation."""
    command = (sys.executable, "-P", "-m", "diptych.cli", "chat", *argv)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *command, stdin=pipe, stdout=pipe, stderr=pipe, env={**os.environ}
    )
    async with asyncio.timeout(300):
        output, errors = await process.communicate(typed)
    assert b"Traceback" not in errors
    return process.returncode, output.decode(), errors.decode()


async def test_lines_of_a_pipe_are_answered_one_by_one(model: Path) -> None:
    worker = FakeWorker("a1", AGGREGATED, tiny_script(model))
    async with running_router(model, [worker]) as router:
        code, output, _ = await chat(b"Hello\n\nno newline \xff at the end", "--url", router.url)

    assert code == 0
    assert output == f"{ANSWER}\n{ANSWER}\n"
    assert len(worker.submits[1].prompt_token_ids) > len(worker.submits[0].prompt_token_ids)


async def test_an_error_is_a_line_and_the_talk_goes_on(model: Path) -> None:
    worker = FakeWorker("a1", AGGREGATED, tiny_script(model))
    async with running_router(model, [worker]) as router:
        long = b"word " * 2000
        code, output, errors = await chat(long + b"\nHello\n", "--url", router.url)
        assert (code, output) == (1, f"{ANSWER}\n")
        assert "error: HTTP 400: This model's maximum context length" in errors

        code, output, errors = await chat(b"Hi\n", "--url", router.url, "--model", "other")
        assert (code, output) == (1, "")
        assert "HTTP 404: The model `other` does not exist." in errors


@pytest.mark.parametrize(
    ("given", "root"),
    [
        ("http://a:1", "http://a:1"),
        ("a:1", "http://a:1"),
        ("[::1]:1/", "http://[::1]:1"),
        ("https://a/v1", "https://a"),
        ("a:1/v1/", "http://a:1"),
        ("http://a/base/v1", "http://a/base"),
    ],
)
async def test_an_address_and_a_base_url_name_a_server_too(given: str, root: str) -> None:
    assert server_root(given) == root


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:1", "nonsense://127.0.0.1:1", "ftp://127.0.0.1:1"]
)
async def test_a_server_that_cannot_be_reached_is_named(url: str) -> None:
    code, output, errors = await chat(b"Hello\n", "--url", url)

    assert (code, output) == (1, "")
    assert errors.startswith(f"diptych: {url} cannot be reached: ")


async def test_what_is_no_server_of_this_kind_is_named(model: Path) -> None:
    worker = FakeWorker("a1", AGGREGATED, tiny_script(model))
    async with running_router(model, [worker]) as router:
        code, _, errors = await chat(b"Hello\n", "--url", f"http://{router.grpc}")
        assert code == 1
        assert "cannot be reached" in errors

        code, _, errors = await chat(b"Hello\n", "--url", router.admin)
        assert code == 1
        assert "HTTP 404" in errors
