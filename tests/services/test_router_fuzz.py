"""Whatever JSON a client sends, it gets an answer or an error of ours; never a surprise."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diptych.clock import SystemClock
from diptych.errors import InvalidRequestError
from diptych.models.config import ModelConfig
from diptych.services.router.inference import process_prompt
from diptych.services.router.openai_api import parse_chat, parse_completion
from diptych.text.chat_template import ChatTemplate
from diptych.text.processor import Processor
from diptych.text.tokenizer import Tokenizer
from diptych.wire import sampling_to_proto
from tests.services.router_fixture import tiny_directory

FIELDS = tuple(
    """
    model prompt messages max_tokens max_completion_tokens temperature top_p top_k min_p n seed stop
    stop_token_ids bad_words allowed_token_ids logit_bias logprobs top_logprobs min_tokens
    prompt_logprobs presence_penalty frequency_penalty repetition_penalty ignore_eos stream
    stream_options echo suffix best_of tools tool_choice response_format cache_salt priority
    detokenize skip_special_tokens add_special_tokens add_generation_prompt return_token_ids
    chat_template_kwargs include_stop_str_in_output use_beam_search modalities
    """.split()  # noqa: SIM905 (a list of forty strings reads worse)
)

names = st.sampled_from(["role", "content", "type", "text", "self", "params", "user", "7", "x"])
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 400),
    st.integers(-(2**80), 2**80),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8),
    st.sampled_from(["user", "text", "none", "the capital", "tiny"]),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(names, inner, max_size=3)),
    max_leaves=6,
)
bodies = st.dictionaries(st.sampled_from(FIELDS), values, max_size=5)
GOOD: dict[str, Any] = {
    "prompt": "the capital",
    "messages": [{"role": "user", "content": "the capital"}],
}


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> Processor:
    path = tiny_directory(tmp_path_factory.mktemp("fuzz"))
    return Processor(
        ModelConfig.from_directory(path),
        Tokenizer.from_directory(path),
        ChatTemplate.from_directory(path, SystemClock()),
        max_model_len=1024,
        rng=random.Random(1),
    )


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(fields=bodies, parse=st.sampled_from([parse_completion, parse_chat]), merge=st.booleans())
def test_any_json_is_a_valid_request_or_the_clients_error(
    processor: Processor, fields: dict[str, Any], parse: Any, merge: bool
) -> None:
    body = {**GOOD, **fields} if merge else fields
    try:
        api = parse(msgspec.json.encode(body))
        for prompt in api.prompts:
            request = process_prompt(processor, prompt, api.sampling)
            sampling_to_proto(request.sampling_params)
            assert request.sampling_params.max_tokens
    except InvalidRequestError:
        return
