"""A Submit as the engine takes it: checked once, here. Pure."""

from __future__ import annotations

from diptych.engine.request import EngineCoreRequest, KVTransferParams
from diptych.errors import InvalidRequestError, RequestTooLargeError
from diptych.proto import worker_pb2
from diptych.sampling_params import SamplingParams
from diptych.wire import commit_from_proto, sampling_from_proto
from diptych.worker.engine import EngineInfo

MAX_CACHE_SALT_CHARS = 1024


def parse_submit(
    message: worker_pb2.SubmitRequest, engine_id: str, info: EngineInfo, max_logprobs: int
) -> EngineCoreRequest:
    """The engine's request.

    Raises:
        InvalidRequestError: it can never run here: bad ids, too long, contradictory hand-off.
    """
    sampling = sampling_from_proto(message.sampling)
    _check_sampling(sampling, info, max_logprobs)
    prompt, output = list(message.prompt_token_ids), list(message.output_token_ids)
    _check_tokens(prompt, output, sampling, info)
    eos = list(message.eos_token_ids)
    if eos and max(eos) >= info.vocab_size:
        raise InvalidRequestError("eos_token_ids are outside the vocabulary", param="eos_token_ids")
    if len(message.cache_salt) > MAX_CACHE_SALT_CHARS:
        raise InvalidRequestError(
            f"cache_salt has more than {MAX_CACHE_SALT_CHARS} characters", param="cache_salt"
        )
    return EngineCoreRequest(
        request_id=engine_id,
        prompt_token_ids=prompt,
        output_token_ids=output,
        sampling_params=sampling,
        eos_token_ids=eos,
        priority=message.priority,
        cache_salt=message.cache_salt if message.HasField("cache_salt") else None,
        kv_transfer_params=_transfer(message),
    )


def _check_sampling(sampling: SamplingParams, info: EngineInfo, max_logprobs: int) -> None:
    if sampling.seed is None or sampling.max_tokens is None:
        raise InvalidRequestError("seed and max_tokens must be set", param="sampling")
    sampling.check_against_model(vocab_size=info.vocab_size, max_logprobs=max_logprobs)
    for word in sampling.bad_words_token_ids or []:
        if not word or max(word) >= info.vocab_size:
            raise InvalidRequestError(
                "bad_words_token_ids has an empty word or one outside the vocabulary",
                param="bad_words_token_ids",
            )


def _check_tokens(
    prompt: list[int], output: list[int], sampling: SamplingParams, info: EngineInfo
) -> None:
    if not prompt:
        raise InvalidRequestError("the prompt is empty", param="prompt_token_ids")
    if max(*prompt, *output, 0) >= info.vocab_size:
        raise InvalidRequestError(
            f"a token id is outside the vocabulary of {info.vocab_size} tokens",
            param="prompt_token_ids",
        )
    if len(prompt) + len(output) >= info.max_model_len:
        raise RequestTooLargeError(
            f"the prompt has {len(prompt)} tokens with {len(output)} of output so far; "
            f"the context holds {info.max_model_len}",
            param="prompt_token_ids",
        )
    if sampling.max_tokens is not None and len(output) >= sampling.max_tokens:
        raise InvalidRequestError("no output token is left to sample", param="output_token_ids")


def _transfer(message: worker_pb2.SubmitRequest) -> KVTransferParams | None:
    if message.handoff_out and message.HasField("handoff_in"):
        raise InvalidRequestError(
            "a request hands KV over or takes it, not both", param="handoff_in"
        )
    if message.handoff_out:
        return KVTransferParams(epoch=message.ticket.epoch, do_remote_decode=True)
    if message.HasField("handoff_in"):
        commit = commit_from_proto(message.handoff_in)
        return KVTransferParams(epoch=message.ticket.epoch, commit=commit)
    return None
