from diptych.engine.kv_cache_manager import KVCacheManager
from diptych.engine.scheduler_request import SchedulerRequest
from tests.engine.make_requests import make_request


def request(request_id: str, prompt: list[int], **fields: object) -> SchedulerRequest:
    return SchedulerRequest(
        make_request(request_id, prompt, **fields), arrival=1, namespace=b"n", max_model_len=10_000
    )


def compute(kv: KVCacheManager, item: SchedulerRequest) -> int:
    """Let the request compute its whole prompt; returns the tokens that it found."""
    computed = kv.get_computed_blocks(item)
    assert kv.allocate_slots(item, item.num_tokens, computed) is not None
    item.num_computed_tokens = item.num_tokens
    kv.cache_blocks(item, item.num_tokens)
    return computed.num_tokens


def test_a_second_request_finds_the_whole_blocks_of_a_shared_prefix() -> None:
    kv = KVCacheManager(num_blocks=16, block_size=16)
    compute(kv, request("a", list(range(40))))
    assert compute(kv, request("b", [*range(40), 7, 8])) == 32
    assert kv.get_block_ids("a")[0][:2] == kv.get_block_ids("b")[0][:2]
    assert kv.get_block_ids("a")[0][2] != kv.get_block_ids("b")[0][2]


def test_a_prompt_that_is_cached_in_full_still_computes_its_last_token() -> None:
    kv = KVCacheManager(num_blocks=16, block_size=16)
    compute(kv, request("a", list(range(32))))
    assert kv.get_computed_blocks(request("b", list(range(32)))).num_tokens == 16
    assert kv.get_computed_blocks(request("c", list(range(33)))).num_tokens == 32


def test_blocks_larger_than_a_hash_unit_are_found_by_their_last_unit() -> None:
    kv = KVCacheManager(num_blocks=8, block_size=64)
    compute(kv, request("a", list(range(150))))
    assert kv.get_computed_blocks(request("b", list(range(150)))).num_tokens == 128


def test_a_salt_keeps_equal_prompts_apart() -> None:
    kv = KVCacheManager(num_blocks=16, block_size=16)
    compute(kv, request("a", list(range(40)), cache_salt="tenant"))
    assert kv.get_computed_blocks(request("b", list(range(40)))).num_tokens == 0
    same = request("c", list(range(40)), cache_salt="tenant")
    assert kv.get_computed_blocks(same).num_tokens == 32


def test_without_prefix_caching_nothing_is_found() -> None:
    kv = KVCacheManager(num_blocks=16, block_size=16, enable_caching=False)
    compute(kv, request("a", list(range(40))))
    assert kv.get_computed_blocks(request("b", list(range(40)))).num_tokens == 0


def test_a_request_for_prompt_logprobs_computes_its_prompt() -> None:
    kv = KVCacheManager(num_blocks=16, block_size=16)
    compute(kv, request("a", list(range(40))))
    wants = request("b", list(range(40)), prompt_logprobs=1)
    assert kv.get_computed_blocks(wants).num_tokens == 0


def test_too_few_blocks_change_nothing() -> None:
    kv = KVCacheManager(num_blocks=4, block_size=16)
    compute(kv, request("a", list(range(33))))
    late = request("b", [*range(16), *range(100, 140)])
    computed = kv.get_computed_blocks(late)
    assert computed.num_tokens == 16
    assert kv.allocate_slots(late, late.num_tokens, computed) is None
    assert kv.pool.num_free == 1
    assert "b" not in kv.req_to_blocks
    assert kv.pool.blocks[kv.get_block_ids("a")[0][0]].ref_count == 1


def test_a_hit_on_free_blocks_takes_them_into_account() -> None:
    kv = KVCacheManager(num_blocks=4, block_size=16)
    first = request("a", list(range(48)))
    compute(kv, first)
    kv.free("a")
    assert kv.pool.num_free == 4
    longer = request("b", list(range(80)))
    assert not kv.can_fit(kv.get_computed_blocks(longer), 80)
    assert kv.can_fit(kv.get_computed_blocks(longer), 64)


def test_quarantined_blocks_are_neither_used_nor_free_until_released() -> None:
    kv = KVCacheManager(num_blocks=4, block_size=16)
    compute(kv, request("a", list(range(33))))
    kv.quarantine("a")
    assert "a" in kv.quarantined
    assert kv.pool.num_free == 1
    kv.free("a")
    assert kv.pool.num_free == 1
    kv.release_quarantine("a")
    assert kv.pool.num_free == 4
    assert not kv.quarantined


def test_each_group_has_blocks_of_its_own_and_a_hit_needs_all_groups() -> None:
    kv = KVCacheManager(num_blocks=16, block_size=16, num_groups=2)
    first = request("a", list(range(33)))
    compute(kv, first)
    groups = kv.get_block_ids("a")
    assert [len(g) for g in groups] == [3, 3]
    assert not set(groups[0]) & set(groups[1])
    assert compute(kv, request("b", list(range(33)))) == 32
    kv.pool._forget(kv.pool.blocks[groups[1][0]])
    assert kv.get_computed_blocks(request("c", list(range(33)))).num_tokens == 0
