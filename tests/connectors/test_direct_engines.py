"""KV straight from a prefill engine's memory into a decode engine's: real processes."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from pathlib import Path

import pytest

from diptych.config import EngineConfig
from diptych.engine.request import FinishReason, KVTransferParams
from tests.connectors.direct_pair import PREFILL, Pair, Worker, running_pair
from tests.engine.make_requests import make_request
from tests.services.test_kvstore import running_node
from tests.tiny_models import make_tiny_model

pytestmark = pytest.mark.anyio
PROMPT = [(7 * i) % 250 for i in range(150)]
SAMPLING = {"max_tokens": 8, "temperature": 0.9, "seed": 3, "presence_penalty": 0.5}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def alone(model: Path) -> list[int]:
    return asyncio.run(answer_of_one_engine(model))


async def answer_of_one_engine(model: Path) -> list[int]:
    worker = Worker("alone")
    await worker.start(
        EngineConfig(model=str(model), dtype="float32", max_model_len=512, num_threads=1)
    )
    listening = asyncio.create_task(worker.listen())
    try:
        await worker.client.submit(make_request("a", PROMPT, **SAMPLING))
        await worker.ended("a")
    finally:
        await worker.client.close()
        await listening
    return [token for _, token in worker.tokens["a"]]


async def hand_over(pair: Pair, name: str = "r") -> list[int]:
    await pair.submit(name, PROMPT, **SAMPLING)
    await pair.ended(name)
    assert pair.prefill.commits[name].num_tokens == len(PROMPT), pair.decode.failures
    assert pair.decode.ends[name] is FinishReason.LENGTH
    await pair.all_free()
    return pair.answer(name)


@pytest.mark.parametrize(
    ("transport", "prefill_block", "decode_block"),
    [("shm", 16, 16), ("tcp", 32, 16), ("grpc", 16, 32)],
)
async def test_the_answer_is_that_of_one_engine(
    model: Path, alone: list[int], transport: str, prefill_block: int, decode_block: int
) -> None:
    """Over each transport, and with unlike blocks."""
    async with running_pair(
        model,
        prefill={"transports": transport, "block_size": prefill_block},
        decode={"transports": transport, "block_size": decode_block},
    ) as pair:
        assert await hand_over(pair) == alone
        # the first token is prefill's, all others are decode's
        assert [position for position, _ in pair.prefill.tokens["r"]] == [0]
        assert pair.decode.client.stats.prompt_tokens_local_compute == 0
        assert pair.decode.client.stats.prompt_tokens_external_kv_transfer == len(PROMPT)
        link = pair.decode.links[PREFILL]
        assert link.usable
        assert link.transport == transport


async def test_engines_of_one_host_need_the_services_only_to_meet(
    model: Path, alone: list[int]
) -> None:
    past = {"shortcut": True}
    async with running_pair(model, prefill=past, decode=past) as pair:
        assert await hand_over(pair) == alone
        pair.relay.cut = True
        assert await hand_over(pair, "again") == alone


async def test_answers_are_the_same_over_a_bad_network_with_unlike_blocks_and_warm_caches(
    model: Path, alone: list[int]
) -> None:
    """Control messages get lost, come twice and out of order; chunks end inside blocks."""
    settings = {"repeat_s": 0.02}
    async with running_pair(
        model,
        seed=1,
        prefill={**settings, "block_size": 16, "max_num_batched_tokens": 40},
        decode={**settings, "block_size": 32, "num_kv_blocks": 40},
    ) as pair:
        names = [f"r{i}" for i in range(6)]
        await asyncio.gather(*(pair.submit(name, PROMPT, **SAMPLING) for name in names))
        await asyncio.gather(*(pair.ended(name) for name in names))
        for name in names:
            assert pair.answer(name) == alone
        # one whose prefix both sides have
        assert await hand_over(pair, "again") == alone
        assert pair.prefill.client.stats.prefix_cache_hits
        assert pair.decode.client.stats.prefix_cache_hits
        assert not pair.decode.failures


async def test_nothing_leaks_when_requests_end_early_anywhere(
    model: Path, alone: list[int]
) -> None:
    async with running_pair(model, prefill={"max_num_batched_tokens": 16}) as pair:
        for number, delay_s in enumerate((0.0, 0.002, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08)):
            for first, second in ((pair.prefill, pair.decode), (pair.decode, pair.prefill)):
                name = f"{first.name}-{number}"
                await pair.submit(name, PROMPT, **{**SAMPLING, "max_tokens": 300})
                await asyncio.sleep(delay_s)
                await first.client.abort([name])
                await second.client.abort([name])
                await pair.ended(name)
                await pair.all_free()
        # the first token may end it: prefill says so, whoever sent it releases decode
        await pair.submit("short", PROMPT, max_tokens=1)
        await pair.prefill.ended("short")
        assert pair.prefill.ends["short"] is FinishReason.LENGTH
        await pair.decode.client.abort(["short"])
        await pair.decode.ended("short")
        await pair.all_free()
        assert await hand_over(pair) == alone


async def test_decode_gives_up_on_a_prefill_worker_that_is_silent_or_gone(
    model: Path, alone: list[int]
) -> None:
    settings = {"silence_s": 4.0, "max_num_batched_tokens": 16, "verdict_s": 4.0}
    async with running_pair(model, prefill=settings, decode=settings) as pair:
        prefill = pair.prefill.client.pid
        assert prefill is not None
        # one that never begins
        await pair.submit_decode("early", PROMPT, ttl_s=0.2)
        await pair.decode.ended("early")
        assert "did not begin in time" in pair.decode.failures["early"]
        # one that hangs, before decode has its word that all is there
        pair.relay.loses = (b"COMMIT", b"slow")
        await pair.submit("slow", PROMPT * 3, **SAMPLING)
        await pair.decode.until(lambda: pair.decode.num_free < 96)
        os.kill(prefill, signal.SIGSTOP)
        await pair.decode.ended("slow")
        assert pair.decode.ends["slow"] is FinishReason.ERROR
        assert pair.decode.failures["slow"]
        await pair.decode.all_free()
        os.kill(prefill, signal.SIGCONT)
        await pair.prefill.client.abort(["slow"])
        await pair.prefill.ended("slow")
        assert await hand_over(pair) == alone
        # one that dies, as early
        pair.relay.loses = (b"COMMIT", b"dead")
        await pair.submit("dead", PROMPT[::-1] * 3, **SAMPLING)
        await pair.decode.until(lambda: pair.decode.num_free < 96)
        os.kill(prefill, signal.SIGKILL)
        pair.lose_prefill()
        await pair.decode.ended("dead")
        assert pair.decode.failures["dead"]
        await pair.decode.all_free()
        # and decode computes what it must itself
        await pair.decode.client.submit(make_request("own", PROMPT, **SAMPLING))
        await pair.decode.ended("own")
        assert [token for _, token in pair.decode.tokens["own"]] == alone


async def test_a_link_that_failed_its_test_is_tested_again(model: Path) -> None:
    async with running_pair(model, decode={"test_s": 1.0, "transports": "tcp"}) as pair:
        prefill = pair.prefill.client.pid
        assert prefill is not None
        links = pair.decode.links
        async with asyncio.timeout(60):
            while not (PREFILL in links and links[PREFILL].usable):
                await asyncio.sleep(0.05)
            os.kill(prefill, signal.SIGSTOP)
            pair.lose_prefill()
            pair.introduce()
            while links[PREFILL].usable or not links[PREFILL].failure:
                await asyncio.sleep(0.05)
            os.kill(prefill, signal.SIGCONT)
            while not links[PREFILL].usable:
                await asyncio.sleep(0.05)


async def test_prefill_takes_its_blocks_back_from_a_reader_that_never_comes(model: Path) -> None:
    settings = {"lease_s": 0.4}
    async with running_pair(model, prefill=settings, decode=settings) as pair:
        await pair.submit_prefill("r", PROMPT, **SAMPLING)
        await pair.prefill.ended("r")
        assert pair.prefill.commits["r"].num_tokens == 0
        assert len(pair.prefill.tokens["r"]) == 1
        await pair.prefill.all_free()
        # a reader that was told too late learns that it is gone
        pair.relay.cut = True
        await pair.submit("cut", PROMPT, **SAMPLING)
        await pair.prefill.ended("cut")
        await pair.prefill.all_free()
        await pair.decode.client.abort(["cut"])
        await pair.decode.all_free()


async def test_decode_waits_for_room_but_not_for_ever(model: Path, alone: list[int]) -> None:
    decode = {"num_kv_blocks": 32, "reserve_s": 3.0}
    async with running_pair(model, decode=decode) as pair:
        # one that has all its blocks, and waits for the end of its prompt
        pair.relay.loses = (b"COMMIT", b"full")
        await pair.submit_decode("full", PROMPT * 2, **SAMPLING)
        await pair.decode.until(lambda: pair.decode.client.stats.num_waiting)
        await pair.submit_prefill("full", PROMPT * 2, **SAMPLING)
        await pair.decode.until(lambda: pair.decode.num_free < 32)
        await pair.submit("late", PROMPT[::-1] * 2, **SAMPLING)
        await pair.decode.ended("late")
        assert "no room" in pair.decode.failures["late"]
        pair.relay.loses = ()
        await pair.decode.client.abort(["full"])
        await pair.prefill.client.abort(["full", "late"])
        await pair.ended("full")
        await pair.all_free()
        assert await hand_over(pair) == alone
        # log probabilities of the prompt are prefill's to give: decode computes none of it
        await pair.submit("logprobs", PROMPT, prompt_logprobs=1, logprobs=2, **SAMPLING)
        await pair.ended("logprobs")
        assert pair.prefill.commits["logprobs"].num_tokens == len(PROMPT)
        assert pair.answer("logprobs") == alone


async def test_a_preempted_prompt_is_not_read(model: Path, alone: list[int]) -> None:
    """Beside a request that grows, the pool of prefill is too small for the prompt under way."""
    prefill = {"num_kv_blocks": 32, "max_num_batched_tokens": 17, "reserve_output": False}
    async with running_pair(model, prefill=prefill) as pair:
        grows = make_request("grows", PROMPT[:100], max_tokens=60, temperature=0.0)
        long = [(5 * i) % 250 for i in range(400)]
        # it finds both at once, however late this process sends the second
        engine = pair.prefill.client.pid
        assert engine is not None
        os.kill(engine, signal.SIGSTOP)
        await pair.prefill.client.submit(grows)
        await pair.submit("r", long, **SAMPLING)
        os.kill(engine, signal.SIGCONT)
        await pair.ended("r")
        assert pair.prefill.client.stats.num_preemptions == 1
        assert re.search("said (REVOKE|GONE)", pair.decode.failures["r"])
        assert pair.prefill.commits["r"].num_tokens == 0
        await pair.prefill.ended("grows")
        await pair.all_free()
        assert await hand_over(pair, "again") == alone


async def test_a_store_beside_takes_what_has_no_peer_and_gives_prefixes(
    model: Path, alone: list[int]
) -> None:
    with running_node() as node:
        beside = {"kvstore": node.address, "lookup_timeout_s": 60.0, "transfer_timeout_s": 60.0}
        async with running_pair(model, prefill=beside, decode=beside) as pair:
            # by way of the store
            out = KVTransferParams(do_remote_decode=True)
            await pair.prefill.client.submit(make_request("s", PROMPT, transfer=out, **SAMPLING))
            await pair.prefill.ended("s")
            commit = pair.prefill.commits["s"]
            assert commit.connector == "StoreConnector" or commit.objects
            first = [token for _, token in pair.prefill.tokens["s"]]
            back = KVTransferParams(commit=commit)
            request = make_request("s", PROMPT, output=first, transfer=back, **SAMPLING)
            await pair.decode.client.submit(request)
            await pair.decode.ended("s")
            assert pair.answer("s") == alone
            assert pair.decode.client.stats.prompt_tokens_external_kv_transfer >= len(PROMPT)
            assert await hand_over(pair) == alone
        async with running_pair(model, prefill=beside, decode=beside) as pair:
            # a fresh worker finds what the one before had stored, and hands that over
            assert await hand_over(pair) == alone
            stats = pair.prefill.client.stats
            assert stats.prompt_tokens_external_kv_transfer == 128
            assert pair.decode.client.stats.prompt_tokens_local_compute == 0


async def find_no_room(pair: Pair, name: str) -> None:
    """A request for which decode has no room until prefill has given its blocks back."""
    full = f"full {name}"
    pair.relay.loses = (b"COMMIT", full.encode())
    await pair.submit_decode(full, PROMPT[::-1] * 3, **SAMPLING)
    await pair.decode.until(lambda: pair.decode.client.stats.num_waiting)
    await pair.submit_prefill(full, PROMPT[::-1] * 3, **SAMPLING)
    await pair.decode.until(lambda: pair.decode.num_free < 32)
    await pair.submit(name, PROMPT, **SAMPLING)
    await pair.prefill.ended(name)
    assert pair.prefill.commits[name].num_tokens == len(PROMPT)
    pair.relay.loses = ()
    await pair.decode.client.abort([full])
    await pair.prefill.client.abort([full])
    await pair.ended(name)
    assert not pair.decode.failures


async def test_prefill_gives_its_blocks_back_where_decode_has_no_room_and_decode_reads_the_store(
    model: Path, alone: list[int]
) -> None:
    with running_node() as node:
        beside = {"kvstore": node.address, "read_prefix": True, "reserve_s": 60.0}
        beside |= {"lookup_timeout_s": 60.0, "transfer_timeout_s": 60.0}
        async with running_pair(
            model,
            prefill={**beside, "hold_s": 0.3},
            decode={**beside, "num_kv_blocks": 32, "write_through": False},
        ) as pair:
            await find_no_room(pair, "late")
            assert pair.answer("late") == alone
            # the tail as well: decode computes nothing of the prompt
            stats = pair.decode.client.stats
            assert stats.prompt_tokens_external_kv_transfer == len(PROMPT)
            assert stats.prompt_tokens_local_compute == 0
            await pair.all_free()
            # where the store is lost, nothing waits for it
            node.process.kill()
            await find_no_room(pair, "later")
            assert pair.answer("later") == alone
            assert pair.decode.client.stats.prompt_tokens_external_kv_transfer == len(PROMPT)
            await pair.all_free()


async def test_the_next_turn_of_a_conversation_finds_what_decode_has_said(model: Path) -> None:
    """Prefill stores the prompt's pages, decode those of its output, each once."""
    with running_node() as node:
        beside = {"kvstore": node.address}
        decode = {**beside, "write_through": False, "store_decoded": True}
        async with running_pair(model, prefill=beside, decode=decode) as pair:
            await pair.submit("r", PROMPT, max_tokens=150, temperature=0.0, ignore_eos=True)
            await pair.ended("r")
            turn = [*PROMPT, *pair.answer("r")]
            await pair.all_free()
            # prefill has the prompt's two pages and not the output's: those are in the store
            name = "next"
            until = time.monotonic() + 30
            while time.monotonic() < until:
                await pair.submit(name, turn, cache_salt=None, max_tokens=4, temperature=0.0)
                await pair.ended(name)
                if pair.prefill.client.stats.prompt_tokens_external_kv_transfer:
                    break
                name += "-"
            assert pair.prefill.client.stats.prompt_tokens_external_kv_transfer >= 64
