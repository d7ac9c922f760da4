"""Protobuf messages to values and back: the one place that knows both."""

from __future__ import annotations

from typing import Any

from diptych.engine.request import KVCommit, KVObject, TokenLogprobs
from diptych.errors import InvalidRequestError
from diptych.proto import common_pb2, worker_pb2
from diptych.sampling_params import SamplingParams

_SCALARS = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "ignore_eos",
    "max_tokens",
    "min_tokens",
    "logprobs",
    "prompt_logprobs",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
)


def sampling_to_proto(params: SamplingParams) -> common_pb2.SamplingParams:
    """Every field that is not None."""
    message = common_pb2.SamplingParams(
        stop=params.stop_strings,
        stop_token_ids=params.stop_token_ids or [],
        bad_words=params.bad_words or [],
        logit_bias=params.logit_bias or {},
        allowed_token_ids=params.allowed_token_ids or [],
    )
    for ids in params.bad_words_token_ids or []:
        message.bad_words_token_ids.add(token_ids=ids)
    for name in _SCALARS:
        value = getattr(params, name)
        if value is not None:
            setattr(message, name, value)
    return message


def sampling_from_proto(message: common_pb2.SamplingParams, **defaults: Any) -> SamplingParams:
    """Checked parameters; `defaults` fill absent fields.

    Raises:
        InvalidRequestError: as `SamplingParams`.
    """
    values: dict[str, Any] = dict(defaults)
    for name in _SCALARS:
        if message.HasField(name):
            values[name] = getattr(message, name)
    values.update(
        stop=list(message.stop),
        stop_token_ids=list(message.stop_token_ids),
        bad_words=list(message.bad_words),
    )
    if message.bad_words_token_ids:
        values["bad_words_token_ids"] = [list(s.token_ids) for s in message.bad_words_token_ids]
    if message.logit_bias:
        values["logit_bias"] = dict(message.logit_bias)
    if message.allowed_token_ids:
        values["allowed_token_ids"] = list(message.allowed_token_ids)
    return SamplingParams(**values)


def commit_to_proto(commit: KVCommit) -> worker_pb2.KvCommit:
    return worker_pb2.KvCommit(
        epoch=commit.epoch,
        kv_namespace=commit.kv_namespace,
        num_tokens=commit.num_tokens,
        connector=commit.connector,
        num_cached_tokens=commit.num_cached_tokens,
        pending=commit.pending,
        objects=[
            worker_pb2.KvObject(
                key=o.key,
                start_token=o.start_token,
                end_token=o.end_token,
                checksum=o.checksum,
                num_bytes=o.num_bytes,
            )
            for o in commit.objects
        ],
    )


def commit_from_proto(message: worker_pb2.KvCommit, *, may_be_direct: bool = False) -> KVCommit:
    """A checked commit. One that is pending, or of a direct hand-off, where that may be, names no
    objects.

    Raises:
        InvalidRequestError: the objects do not cover [0, num_tokens) in order without gaps.
    """
    objects = [
        KVObject(
            key=o.key,
            start_token=o.start_token,
            end_token=o.end_token,
            checksum=o.checksum,
            num_bytes=o.num_bytes,
        )
        for o in message.objects
    ]
    position = 0
    for item in objects:
        if item.start_token != position or item.end_token <= position or len(item.key) != 32:
            raise InvalidRequestError("the commit's objects have a gap", param="handoff_in")
        position = item.end_token
    names_none = not objects and (may_be_direct or message.pending)
    if (position != message.num_tokens and not names_none) or (message.pending and objects):
        raise InvalidRequestError("the commit's objects do not reach its end", param="handoff_in")
    return KVCommit(
        epoch=message.epoch,
        kv_namespace=message.kv_namespace,
        num_tokens=message.num_tokens,
        objects=objects,
        connector=message.connector,
        num_cached_tokens=message.num_cached_tokens,
        pending=message.pending,
    )


def logprobs_to_proto(packed: TokenLogprobs) -> common_pb2.PackedLogprobs:
    return common_pb2.PackedLogprobs(
        width=packed.width,
        token_ids=packed.token_ids,
        logprobs=packed.logprobs,
        ranks=packed.ranks,
    )


def logprobs_from_proto(message: common_pb2.PackedLogprobs) -> TokenLogprobs:
    """Checked log probabilities.

    Raises:
        InvalidRequestError: the arrays are not `width` entries for each rank.
    """
    num_entries = message.width * len(message.ranks)
    if not (message.width and num_entries == len(message.token_ids) == len(message.logprobs)):
        raise InvalidRequestError("packed log probabilities have arrays of other lengths")
    return TokenLogprobs(
        width=message.width,
        token_ids=list(message.token_ids),
        logprobs=list(message.logprobs),
        ranks=list(message.ranks),
    )
