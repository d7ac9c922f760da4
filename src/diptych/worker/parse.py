"""A Submit as the engine takes it: checked once, here. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from diptych.engine.request import (
    DEFAULT_TTL_S,
    MAX_CACHE_SALT_CHARS,
    EngineCoreRequest,
    HandoffPeer,
    KVTransferParams,
)
from diptych.errors import ContextLengthError, InvalidRequestError
from diptych.proto import worker_pb2
from diptych.sampling_params import SamplingParams
from diptych.wire import commit_from_proto, sampling_from_proto


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """What a request is checked against."""

    vocab_size: int
    max_model_len: int
    max_logprobs: int


def parse_submit(
    message: worker_pb2.SubmitRequest, engine_id: str, limits: ModelLimits
) -> EngineCoreRequest:
    """The engine's request.

    Raises:
        InvalidRequestError: it can never run here: bad ids, too long, contradictory hand-off.
    """
    sampling = sampling_from_proto(message.sampling)
    _check_sampling(sampling, limits)
    prompt, output = list(message.prompt_token_ids), list(message.output_token_ids)
    _check_tokens(prompt, output, sampling, limits)
    eos = list(message.eos_token_ids)
    if eos and max(eos) >= limits.vocab_size:
        raise InvalidRequestError("eos_token_ids are outside the vocabulary", param="eos_token_ids")
    sampling.check_logit_edits(len(eos))
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
        tenant=message.tenant,
        kv_transfer_params=_transfer(message),
    )


def _check_sampling(sampling: SamplingParams, limits: ModelLimits) -> None:
    if sampling.seed is None or sampling.max_tokens is None:
        raise InvalidRequestError("seed and max_tokens must be set", param="sampling")
    sampling.check_against_model(vocab_size=limits.vocab_size, max_logprobs=limits.max_logprobs)


def _check_tokens(
    prompt: list[int], output: list[int], sampling: SamplingParams, limits: ModelLimits
) -> None:
    if not prompt:
        raise InvalidRequestError("the prompt is empty", param="prompt_token_ids")
    if max(*prompt, *output, 0) >= limits.vocab_size:
        raise InvalidRequestError(
            f"a token id is outside the vocabulary of {limits.vocab_size} tokens",
            param="prompt_token_ids",
        )
    if len(prompt) + len(output) >= limits.max_model_len:
        raise ContextLengthError(
            f"the prompt has {len(prompt)} tokens with {len(output)} of output so far; "
            f"the context holds {limits.max_model_len}",
            param="prompt_token_ids",
        )
    if sampling.max_tokens is not None and len(output) >= sampling.max_tokens:
        raise InvalidRequestError("no output token is left to sample", param="output_token_ids")


def _transfer(message: worker_pb2.SubmitRequest) -> KVTransferParams | None:
    if message.handoff_out and message.HasField("handoff_in"):
        raise InvalidRequestError(
            "a request hands KV over or takes it, not both", param="handoff_in"
        )
    if message.HasField("handoff_peer"):
        return _direct(message)
    if message.handoff_out:
        return KVTransferParams(epoch=message.ticket.epoch, do_remote_decode=True)
    if message.HasField("handoff_in"):
        commit = commit_from_proto(message.handoff_in)
        if commit.pending and commit.num_tokens > len(message.prompt_token_ids):
            raise InvalidRequestError(
                "the commit has more tokens than the prompt", param="handoff_in"
            )
        return KVTransferParams(epoch=message.ticket.epoch, commit=commit)
    return None


def _direct(message: worker_pb2.SubmitRequest) -> KVTransferParams:
    if message.HasField("handoff_in"):
        raise InvalidRequestError(
            "a request reads its KV from a peer or loads it, not both", param="handoff_peer"
        )
    peer, ticket = message.handoff_peer, message.ticket
    vouched = ticket.decode_incarnation if message.handoff_out else ticket.prefill_incarnation
    if not peer.incarnation or peer.incarnation != vouched:
        raise InvalidRequestError("the peer is not the ticket's", param="handoff_peer")
    return KVTransferParams(
        epoch=ticket.epoch,
        do_remote_decode=message.handoff_out,
        peer=HandoffPeer(
            worker_id=peer.worker_id, incarnation=peer.incarnation, address=peer.address
        ),
        ttl_s=ticket.ttl_ms / 1e3 or DEFAULT_TTL_S,
    )
