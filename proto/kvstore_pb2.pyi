from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ItemStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ITEM_STATUS_UNSPECIFIED: _ClassVar[ItemStatus]
    ITEM_STATUS_OK: _ClassVar[ItemStatus]
    ITEM_STATUS_NOT_FOUND: _ClassVar[ItemStatus]
    ITEM_STATUS_EXISTS: _ClassVar[ItemStatus]
    ITEM_STATUS_NO_SPACE: _ClassVar[ItemStatus]
    ITEM_STATUS_EXPIRED: _ClassVar[ItemStatus]
    ITEM_STATUS_INVALID: _ClassVar[ItemStatus]

class PinLevel(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PIN_LEVEL_UNSPECIFIED: _ClassVar[PinLevel]
    PIN_LEVEL_NONE: _ClassVar[PinLevel]
    PIN_LEVEL_SOFT: _ClassVar[PinLevel]
    PIN_LEVEL_HARD: _ClassVar[PinLevel]
ITEM_STATUS_UNSPECIFIED: ItemStatus
ITEM_STATUS_OK: ItemStatus
ITEM_STATUS_NOT_FOUND: ItemStatus
ITEM_STATUS_EXISTS: ItemStatus
ITEM_STATUS_NO_SPACE: ItemStatus
ITEM_STATUS_EXPIRED: ItemStatus
ITEM_STATUS_INVALID: ItemStatus
PIN_LEVEL_UNSPECIFIED: PinLevel
PIN_LEVEL_NONE: PinLevel
PIN_LEVEL_SOFT: PinLevel
PIN_LEVEL_HARD: PinLevel

class Placement(_message.Message):
    __slots__ = ("offset_bytes", "num_bytes")
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    offset_bytes: int
    num_bytes: int
    def __init__(self, offset_bytes: _Optional[int] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class GetNodeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StoreNode(_message.Message):
    __slots__ = ("node_id", "incarnation", "memory_socket", "boot_id", "stream_address", "pool_bytes", "access_token")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MEMORY_SOCKET_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    STREAM_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    POOL_BYTES_FIELD_NUMBER: _ClassVar[int]
    ACCESS_TOKEN_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    incarnation: str
    memory_socket: str
    boot_id: str
    stream_address: str
    pool_bytes: int
    access_token: bytes
    def __init__(self, node_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., memory_socket: _Optional[str] = ..., boot_id: _Optional[str] = ..., stream_address: _Optional[str] = ..., pool_bytes: _Optional[int] = ..., access_token: _Optional[bytes] = ...) -> None: ...

class PutStartRequest(_message.Message):
    __slots__ = ("items", "incarnation", "tenant")
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[PutItem]
    incarnation: str
    tenant: str
    def __init__(self, items: _Optional[_Iterable[_Union[PutItem, _Mapping]]] = ..., incarnation: _Optional[str] = ..., tenant: _Optional[str] = ...) -> None: ...

class PutItem(_message.Message):
    __slots__ = ("key", "num_bytes")
    KEY_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    num_bytes: int
    def __init__(self, key: _Optional[bytes] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class PutStartResponse(_message.Message):
    __slots__ = ("reservations",)
    RESERVATIONS_FIELD_NUMBER: _ClassVar[int]
    reservations: _containers.RepeatedCompositeFieldContainer[PutReservation]
    def __init__(self, reservations: _Optional[_Iterable[_Union[PutReservation, _Mapping]]] = ...) -> None: ...

class PutReservation(_message.Message):
    __slots__ = ("status", "put_id", "placement", "ttl_ms", "checksum")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    PUT_ID_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    status: ItemStatus
    put_id: int
    placement: Placement
    ttl_ms: int
    checksum: int
    def __init__(self, status: _Optional[_Union[ItemStatus, str]] = ..., put_id: _Optional[int] = ..., placement: _Optional[_Union[Placement, _Mapping]] = ..., ttl_ms: _Optional[int] = ..., checksum: _Optional[int] = ...) -> None: ...

class PutEndRequest(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[PutEndItem]
    def __init__(self, items: _Optional[_Iterable[_Union[PutEndItem, _Mapping]]] = ...) -> None: ...

class PutEndItem(_message.Message):
    __slots__ = ("put_id", "checksum")
    PUT_ID_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    put_id: int
    checksum: int
    def __init__(self, put_id: _Optional[int] = ..., checksum: _Optional[int] = ...) -> None: ...

class PutEndResponse(_message.Message):
    __slots__ = ("statuses",)
    STATUSES_FIELD_NUMBER: _ClassVar[int]
    statuses: _containers.RepeatedScalarFieldContainer[ItemStatus]
    def __init__(self, statuses: _Optional[_Iterable[_Union[ItemStatus, str]]] = ...) -> None: ...

class PutRevokeRequest(_message.Message):
    __slots__ = ("put_ids",)
    PUT_IDS_FIELD_NUMBER: _ClassVar[int]
    put_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, put_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class PutRevokeResponse(_message.Message):
    __slots__ = ("statuses",)
    STATUSES_FIELD_NUMBER: _ClassVar[int]
    statuses: _containers.RepeatedScalarFieldContainer[ItemStatus]
    def __init__(self, statuses: _Optional[_Iterable[_Union[ItemStatus, str]]] = ...) -> None: ...

class GetRequest(_message.Message):
    __slots__ = ("keys", "lease_ms", "incarnation", "wait_ms")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    lease_ms: int
    incarnation: str
    wait_ms: int
    def __init__(self, keys: _Optional[_Iterable[bytes]] = ..., lease_ms: _Optional[int] = ..., incarnation: _Optional[str] = ..., wait_ms: _Optional[int] = ...) -> None: ...

class GetResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[GetResult]
    def __init__(self, results: _Optional[_Iterable[_Union[GetResult, _Mapping]]] = ...) -> None: ...

class GetResult(_message.Message):
    __slots__ = ("status", "placement", "checksum", "lease_id", "lease_ms", "num_copies")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    NUM_COPIES_FIELD_NUMBER: _ClassVar[int]
    status: ItemStatus
    placement: Placement
    checksum: int
    lease_id: int
    lease_ms: int
    num_copies: int
    def __init__(self, status: _Optional[_Union[ItemStatus, str]] = ..., placement: _Optional[_Union[Placement, _Mapping]] = ..., checksum: _Optional[int] = ..., lease_id: _Optional[int] = ..., lease_ms: _Optional[int] = ..., num_copies: _Optional[int] = ...) -> None: ...

class VerifyLeaseRequest(_message.Message):
    __slots__ = ("lease_ids", "renew_ms")
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    RENEW_MS_FIELD_NUMBER: _ClassVar[int]
    lease_ids: _containers.RepeatedScalarFieldContainer[int]
    renew_ms: int
    def __init__(self, lease_ids: _Optional[_Iterable[int]] = ..., renew_ms: _Optional[int] = ...) -> None: ...

class VerifyLeaseResponse(_message.Message):
    __slots__ = ("statuses",)
    STATUSES_FIELD_NUMBER: _ClassVar[int]
    statuses: _containers.RepeatedScalarFieldContainer[ItemStatus]
    def __init__(self, statuses: _Optional[_Iterable[_Union[ItemStatus, str]]] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("lease_ids",)
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    lease_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, lease_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ("statuses",)
    STATUSES_FIELD_NUMBER: _ClassVar[int]
    statuses: _containers.RepeatedScalarFieldContainer[ItemStatus]
    def __init__(self, statuses: _Optional[_Iterable[_Union[ItemStatus, str]]] = ...) -> None: ...

class ExistsRequest(_message.Message):
    __slots__ = ("keys",)
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, keys: _Optional[_Iterable[bytes]] = ...) -> None: ...

class ExistsResponse(_message.Message):
    __slots__ = ("present",)
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    present: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, present: _Optional[_Iterable[bool]] = ...) -> None: ...

class GetStatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StoreStats(_message.Message):
    __slots__ = ("num_objects", "used_bytes", "pool_bytes", "puts_total", "hits_total", "misses_total", "evictions_total", "stale_puts_total", "num_leases", "num_puts", "num_disk_objects", "disk_used_bytes", "disk_bytes", "disk_hits_total", "corrupt_total", "copies_total", "pinned_bytes", "tenant_bytes", "quota_refusals_total")
    class TenantBytesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NUM_OBJECTS_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    POOL_BYTES_FIELD_NUMBER: _ClassVar[int]
    PUTS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    HITS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    MISSES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    EVICTIONS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    STALE_PUTS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    NUM_LEASES_FIELD_NUMBER: _ClassVar[int]
    NUM_PUTS_FIELD_NUMBER: _ClassVar[int]
    NUM_DISK_OBJECTS_FIELD_NUMBER: _ClassVar[int]
    DISK_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_HITS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    CORRUPT_TOTAL_FIELD_NUMBER: _ClassVar[int]
    COPIES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    PINNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    TENANT_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUOTA_REFUSALS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    num_objects: int
    used_bytes: int
    pool_bytes: int
    puts_total: int
    hits_total: int
    misses_total: int
    evictions_total: int
    stale_puts_total: int
    num_leases: int
    num_puts: int
    num_disk_objects: int
    disk_used_bytes: int
    disk_bytes: int
    disk_hits_total: int
    corrupt_total: int
    copies_total: int
    pinned_bytes: int
    tenant_bytes: _containers.ScalarMap[str, int]
    quota_refusals_total: int
    def __init__(self, num_objects: _Optional[int] = ..., used_bytes: _Optional[int] = ..., pool_bytes: _Optional[int] = ..., puts_total: _Optional[int] = ..., hits_total: _Optional[int] = ..., misses_total: _Optional[int] = ..., evictions_total: _Optional[int] = ..., stale_puts_total: _Optional[int] = ..., num_leases: _Optional[int] = ..., num_puts: _Optional[int] = ..., num_disk_objects: _Optional[int] = ..., disk_used_bytes: _Optional[int] = ..., disk_bytes: _Optional[int] = ..., disk_hits_total: _Optional[int] = ..., corrupt_total: _Optional[int] = ..., copies_total: _Optional[int] = ..., pinned_bytes: _Optional[int] = ..., tenant_bytes: _Optional[_Mapping[str, int]] = ..., quota_refusals_total: _Optional[int] = ...) -> None: ...

class PinRequest(_message.Message):
    __slots__ = ("keys", "level")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    level: PinLevel
    def __init__(self, keys: _Optional[_Iterable[bytes]] = ..., level: _Optional[_Union[PinLevel, str]] = ...) -> None: ...

class PinResponse(_message.Message):
    __slots__ = ("statuses",)
    STATUSES_FIELD_NUMBER: _ClassVar[int]
    statuses: _containers.RepeatedScalarFieldContainer[ItemStatus]
    def __init__(self, statuses: _Optional[_Iterable[_Union[ItemStatus, str]]] = ...) -> None: ...

class CheckRequest(_message.Message):
    __slots__ = ("keys",)
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, keys: _Optional[_Iterable[bytes]] = ...) -> None: ...

class CheckResponse(_message.Message):
    __slots__ = ("statuses",)
    STATUSES_FIELD_NUMBER: _ClassVar[int]
    statuses: _containers.RepeatedScalarFieldContainer[ItemStatus]
    def __init__(self, statuses: _Optional[_Iterable[_Union[ItemStatus, str]]] = ...) -> None: ...

class EvictRequest(_message.Message):
    __slots__ = ("keys", "all")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    all: bool
    def __init__(self, keys: _Optional[_Iterable[bytes]] = ..., all: _Optional[bool] = ...) -> None: ...

class EvictResponse(_message.Message):
    __slots__ = ("num_objects",)
    NUM_OBJECTS_FIELD_NUMBER: _ClassVar[int]
    num_objects: int
    def __init__(self, num_objects: _Optional[int] = ...) -> None: ...

class ListRequest(_message.Message):
    __slots__ = ("after", "limit")
    AFTER_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    after: bytes
    limit: int
    def __init__(self, after: _Optional[bytes] = ..., limit: _Optional[int] = ...) -> None: ...

class ListResponse(_message.Message):
    __slots__ = ("objects",)
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    objects: _containers.RepeatedCompositeFieldContainer[StoredObject]
    def __init__(self, objects: _Optional[_Iterable[_Union[StoredObject, _Mapping]]] = ...) -> None: ...

class StoredObject(_message.Message):
    __slots__ = ("key", "num_bytes", "tier")
    KEY_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    num_bytes: int
    tier: str
    def __init__(self, key: _Optional[bytes] = ..., num_bytes: _Optional[int] = ..., tier: _Optional[str] = ...) -> None: ...
