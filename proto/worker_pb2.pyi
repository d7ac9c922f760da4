from diptych.proto import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HandoffPeer(_message.Message):
    __slots__ = ("worker_id", "incarnation", "address")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: str
    address: str
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class HandoffFrame(_message.Message):
    __slots__ = ("hello", "body", "challenge")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    CHALLENGE_FIELD_NUMBER: _ClassVar[int]
    hello: HandoffHello
    body: bytes
    challenge: HandoffChallenge
    def __init__(self, hello: _Optional[_Union[HandoffHello, _Mapping]] = ..., body: _Optional[bytes] = ..., challenge: _Optional[_Union[HandoffChallenge, _Mapping]] = ...) -> None: ...

class HandoffChallenge(_message.Message):
    __slots__ = ("nonce", "incarnation", "key_id", "signature")
    NONCE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    nonce: bytes
    incarnation: str
    key_id: str
    signature: bytes
    def __init__(self, nonce: _Optional[bytes] = ..., incarnation: _Optional[str] = ..., key_id: _Optional[str] = ..., signature: _Optional[bytes] = ...) -> None: ...

class HandoffHello(_message.Message):
    __slots__ = ("worker_id", "incarnation", "kv_namespace", "protocol_version", "cards", "key_id", "signature")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    KV_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    CARDS_FIELD_NUMBER: _ClassVar[int]
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: str
    kv_namespace: str
    protocol_version: int
    cards: bytes
    key_id: str
    signature: bytes
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., kv_namespace: _Optional[str] = ..., protocol_version: _Optional[int] = ..., cards: _Optional[bytes] = ..., key_id: _Optional[str] = ..., signature: _Optional[bytes] = ...) -> None: ...

class GetInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerInfo(_message.Message):
    __slots__ = ("worker_id", "incarnation", "role", "model", "kv_namespace", "protocol_version", "max_model_len", "load", "draining", "address", "direct", "handoff_links", "stores", "kv_bytes_per_token", "follows")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    KV_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DIRECT_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_LINKS_FIELD_NUMBER: _ClassVar[int]
    STORES_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    FOLLOWS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: str
    role: _common_pb2.Role
    model: str
    kv_namespace: str
    protocol_version: int
    max_model_len: int
    load: WorkerLoad
    draining: bool
    address: str
    direct: bool
    handoff_links: _containers.RepeatedCompositeFieldContainer[HandoffLink]
    stores: bool
    kv_bytes_per_token: int
    follows: bool
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., role: _Optional[_Union[_common_pb2.Role, str]] = ..., model: _Optional[str] = ..., kv_namespace: _Optional[str] = ..., protocol_version: _Optional[int] = ..., max_model_len: _Optional[int] = ..., load: _Optional[_Union[WorkerLoad, _Mapping]] = ..., draining: _Optional[bool] = ..., address: _Optional[str] = ..., direct: _Optional[bool] = ..., handoff_links: _Optional[_Iterable[_Union[HandoffLink, _Mapping]]] = ..., stores: _Optional[bool] = ..., kv_bytes_per_token: _Optional[int] = ..., follows: _Optional[bool] = ...) -> None: ...

class HandoffLink(_message.Message):
    __slots__ = ("incarnation", "transport", "gb_per_s", "failure")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    GB_PER_S_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    transport: str
    gb_per_s: float
    failure: str
    def __init__(self, incarnation: _Optional[str] = ..., transport: _Optional[str] = ..., gb_per_s: _Optional[float] = ..., failure: _Optional[str] = ...) -> None: ...

class WorkerLoad(_message.Message):
    __slots__ = ("num_running", "num_waiting", "num_pending_tokens", "kv_usage", "num_kv_blocks")
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_PENDING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_USAGE_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_running: int
    num_waiting: int
    num_pending_tokens: int
    kv_usage: float
    num_kv_blocks: int
    def __init__(self, num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_pending_tokens: _Optional[int] = ..., kv_usage: _Optional[float] = ..., num_kv_blocks: _Optional[int] = ...) -> None: ...

class Ticket(_message.Message):
    __slots__ = ("request_id", "router_incarnation", "prefill_incarnation", "decode_incarnation", "epoch", "nonce", "ttl_ms", "key_id", "signature")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ROUTER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PREFILL_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    DECODE_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    router_incarnation: str
    prefill_incarnation: str
    decode_incarnation: str
    epoch: int
    nonce: int
    ttl_ms: int
    key_id: str
    signature: bytes
    def __init__(self, request_id: _Optional[str] = ..., router_incarnation: _Optional[str] = ..., prefill_incarnation: _Optional[str] = ..., decode_incarnation: _Optional[str] = ..., epoch: _Optional[int] = ..., nonce: _Optional[int] = ..., ttl_ms: _Optional[int] = ..., key_id: _Optional[str] = ..., signature: _Optional[bytes] = ...) -> None: ...

class SubmitRequest(_message.Message):
    __slots__ = ("ticket", "prompt_token_ids", "output_token_ids", "sampling", "eos_token_ids", "priority", "cache_salt", "handoff_out", "handoff_in", "traceparent", "tenant", "handoff_peer")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_OUT_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_IN_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_PEER_FIELD_NUMBER: _ClassVar[int]
    ticket: Ticket
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    output_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _common_pb2.SamplingParams
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    priority: int
    cache_salt: str
    handoff_out: bool
    handoff_in: KvCommit
    traceparent: str
    tenant: str
    handoff_peer: HandoffPeer
    def __init__(self, ticket: _Optional[_Union[Ticket, _Mapping]] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., output_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., priority: _Optional[int] = ..., cache_salt: _Optional[str] = ..., handoff_out: _Optional[bool] = ..., handoff_in: _Optional[_Union[KvCommit, _Mapping]] = ..., traceparent: _Optional[str] = ..., tenant: _Optional[str] = ..., handoff_peer: _Optional[_Union[HandoffPeer, _Mapping]] = ...) -> None: ...

class SubmitResponse(_message.Message):
    __slots__ = ("load",)
    LOAD_FIELD_NUMBER: _ClassVar[int]
    load: WorkerLoad
    def __init__(self, load: _Optional[_Union[WorkerLoad, _Mapping]] = ...) -> None: ...

class KvObject(_message.Message):
    __slots__ = ("key", "start_token", "end_token", "checksum", "num_bytes")
    KEY_FIELD_NUMBER: _ClassVar[int]
    START_TOKEN_FIELD_NUMBER: _ClassVar[int]
    END_TOKEN_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    start_token: int
    end_token: int
    checksum: int
    num_bytes: int
    def __init__(self, key: _Optional[bytes] = ..., start_token: _Optional[int] = ..., end_token: _Optional[int] = ..., checksum: _Optional[int] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class KvCommit(_message.Message):
    __slots__ = ("epoch", "kv_namespace", "num_tokens", "objects", "connector", "num_cached_tokens", "pending")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    KV_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    CONNECTOR_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    kv_namespace: str
    num_tokens: int
    objects: _containers.RepeatedCompositeFieldContainer[KvObject]
    connector: str
    num_cached_tokens: int
    pending: bool
    def __init__(self, epoch: _Optional[int] = ..., kv_namespace: _Optional[str] = ..., num_tokens: _Optional[int] = ..., objects: _Optional[_Iterable[_Union[KvObject, _Mapping]]] = ..., connector: _Optional[str] = ..., num_cached_tokens: _Optional[int] = ..., pending: _Optional[bool] = ...) -> None: ...

class RouterMessage(_message.Message):
    __slots__ = ("hello", "ack", "cancel", "handoff_peers")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_PEERS_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    ack: Ack
    cancel: Cancel
    handoff_peers: HandoffPeers
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., ack: _Optional[_Union[Ack, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., handoff_peers: _Optional[_Union[HandoffPeers, _Mapping]] = ...) -> None: ...

class HandoffPeers(_message.Message):
    __slots__ = ("peers",)
    PEERS_FIELD_NUMBER: _ClassVar[int]
    peers: _containers.RepeatedCompositeFieldContainer[HandoffPeer]
    def __init__(self, peers: _Optional[_Iterable[_Union[HandoffPeer, _Mapping]]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("router_incarnation", "protocol_version", "worker_incarnation", "last_sequence", "audience", "key_id", "signature")
    ROUTER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    WORKER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LAST_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    AUDIENCE_FIELD_NUMBER: _ClassVar[int]
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    router_incarnation: str
    protocol_version: int
    worker_incarnation: str
    last_sequence: int
    audience: str
    key_id: str
    signature: bytes
    def __init__(self, router_incarnation: _Optional[str] = ..., protocol_version: _Optional[int] = ..., worker_incarnation: _Optional[str] = ..., last_sequence: _Optional[int] = ..., audience: _Optional[str] = ..., key_id: _Optional[str] = ..., signature: _Optional[bytes] = ...) -> None: ...

class Ack(_message.Message):
    __slots__ = ("sequence",)
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    def __init__(self, sequence: _Optional[int] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("request_ids", "epochs")
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    epochs: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_ids: _Optional[_Iterable[str]] = ..., epochs: _Optional[_Iterable[int]] = ...) -> None: ...

class WorkerFrame(_message.Message):
    __slots__ = ("sequence", "incarnation", "request_ids", "epochs", "first_positions", "token_counts", "token_ids", "finish_reasons", "stop_token_ids", "num_cached_tokens", "extras", "load", "gap")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    FIRST_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASONS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXTRAS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    GAP_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    incarnation: str
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    epochs: _containers.RepeatedScalarFieldContainer[int]
    first_positions: _containers.RepeatedScalarFieldContainer[int]
    token_counts: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    finish_reasons: _containers.RepeatedScalarFieldContainer[_common_pb2.FinishReason]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_cached_tokens: _containers.RepeatedScalarFieldContainer[int]
    extras: _containers.RepeatedCompositeFieldContainer[EntryExtra]
    load: WorkerLoad
    gap: bool
    def __init__(self, sequence: _Optional[int] = ..., incarnation: _Optional[str] = ..., request_ids: _Optional[_Iterable[str]] = ..., epochs: _Optional[_Iterable[int]] = ..., first_positions: _Optional[_Iterable[int]] = ..., token_counts: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., finish_reasons: _Optional[_Iterable[_Union[_common_pb2.FinishReason, str]]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., num_cached_tokens: _Optional[_Iterable[int]] = ..., extras: _Optional[_Iterable[_Union[EntryExtra, _Mapping]]] = ..., load: _Optional[_Union[WorkerLoad, _Mapping]] = ..., gap: _Optional[bool] = ...) -> None: ...

class EntryExtra(_message.Message):
    __slots__ = ("entry", "logprobs", "prompt_logprobs", "commit", "error", "handoff_failed")
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_FAILED_FIELD_NUMBER: _ClassVar[int]
    entry: int
    logprobs: _common_pb2.PackedLogprobs
    prompt_logprobs: _common_pb2.PackedLogprobs
    commit: KvCommit
    error: str
    handoff_failed: str
    def __init__(self, entry: _Optional[int] = ..., logprobs: _Optional[_Union[_common_pb2.PackedLogprobs, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[_common_pb2.PackedLogprobs, _Mapping]] = ..., commit: _Optional[_Union[KvCommit, _Mapping]] = ..., error: _Optional[str] = ..., handoff_failed: _Optional[str] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("deadline_ms", "incarnation", "key_id", "signature")
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    deadline_ms: int
    incarnation: str
    key_id: str
    signature: bytes
    def __init__(self, deadline_ms: _Optional[int] = ..., incarnation: _Optional[str] = ..., key_id: _Optional[str] = ..., signature: _Optional[bytes] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("num_left",)
    NUM_LEFT_FIELD_NUMBER: _ClassVar[int]
    num_left: int
    def __init__(self, num_left: _Optional[int] = ...) -> None: ...
