"""Every failure has a name and a status.

DiptychError
├── InvalidRequestError        INVALID_ARGUMENT     400  the caller's mistake
│   ├── UnsupportedFeatureError   UNIMPLEMENTED     400  known, but not in this version
│   ├── ContextLengthError     INVALID_ARGUMENT     400  prompt, or prompt and output, too long
│   └── RequestTooLargeError   INVALID_ARGUMENT     413  body or prompt over a size limit
├── AuthenticationError        UNAUTHENTICATED      401
├── ModelNotFoundError         NOT_FOUND            404
├── CapacityError              RESOURCE_EXHAUSTED   429  try again later
├── UnavailableError           UNAVAILABLE          503  no worker, no stream, not ready
│   ├── DrainingError          UNAVAILABLE          503
│   └── NoStreamError          FAILED_PRECONDITION  503  the router must open its stream first
├── DeadlineError              DEADLINE_EXCEEDED    504
├── RequestAbortedError        CANCELLED            499  the client left
├── StaleTicketError           FAILED_PRECONDITION  409  wrong incarnation, epoch, nonce, key
├── DuplicateRequestError      ALREADY_EXISTS       409  this id and epoch were submitted before
├── EngineError                INTERNAL             500
│   └── EngineDeadError        UNAVAILABLE          503
├── TransferError              UNAVAILABLE          503  KV bytes did not arrive or did not verify
├── ModelLoadError             FAILED_PRECONDITION  500  missing, truncated or unsupported model
└── ConfigError                INVALID_ARGUMENT     400  bad flag, variable or YAML key
    └── AddressError           INVALID_ARGUMENT     400  no address that peers can reach
"""

from __future__ import annotations

from typing import ClassVar


class DiptychError(Exception):
    """Base of all errors that cross a boundary; `param` names the field at fault, if one is.

    `grpc_status` is the name of a `grpc.StatusCode`: whoever never speaks gRPC need not import it.
    """

    grpc_status: ClassVar[str] = "INTERNAL"
    http_status: ClassVar[int] = 500
    type: ClassVar[str] = "internal_error"
    code: ClassVar[str | None] = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequestError(DiptychError, ValueError):
    grpc_status = "INVALID_ARGUMENT"
    http_status = 400
    type = "invalid_request_error"


class UnsupportedFeatureError(InvalidRequestError):
    grpc_status = "UNIMPLEMENTED"
    code = "unsupported_feature"


class ContextLengthError(InvalidRequestError):
    code = "context_length_exceeded"


class RequestTooLargeError(InvalidRequestError):
    http_status = 413
    code = "request_too_large"


class AuthenticationError(DiptychError):
    grpc_status = "UNAUTHENTICATED"
    http_status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"


class ModelNotFoundError(DiptychError):
    grpc_status = "NOT_FOUND"
    http_status = 404
    type = "invalid_request_error"
    code = "model_not_found"


class CapacityError(DiptychError):
    grpc_status = "RESOURCE_EXHAUSTED"
    http_status = 429
    type = "rate_limit_error"
    code = "over_capacity"


class UnavailableError(DiptychError):
    grpc_status = "UNAVAILABLE"
    http_status = 503
    type = "service_unavailable_error"
    code = "unavailable"


class DrainingError(UnavailableError):
    code = "draining"


class NoStreamError(UnavailableError):
    grpc_status = "FAILED_PRECONDITION"
    code = "no_stream"


class DeadlineError(DiptychError):
    grpc_status = "DEADLINE_EXCEEDED"
    http_status = 504
    type = "timeout_error"
    code = "deadline_exceeded"


class RequestAbortedError(DiptychError):
    grpc_status = "CANCELLED"
    http_status = 499
    type = "request_aborted"


class StaleTicketError(DiptychError):
    grpc_status = "FAILED_PRECONDITION"
    http_status = 409
    code = "stale_ticket"


class DuplicateRequestError(DiptychError):
    grpc_status = "ALREADY_EXISTS"
    http_status = 409
    code = "duplicate_request"


class EngineError(DiptychError):
    code = "engine_error"


class EngineDeadError(EngineError):
    grpc_status = "UNAVAILABLE"
    http_status = 503
    code = "engine_dead"


class TransferError(DiptychError):
    grpc_status = "UNAVAILABLE"
    http_status = 503
    code = "transfer_failed"


class ModelLoadError(DiptychError):
    grpc_status = "FAILED_PRECONDITION"
    code = "model_load_failed"


class ConfigError(DiptychError, ValueError):
    grpc_status = "INVALID_ARGUMENT"
    http_status = 400
    type = "config_error"


class AddressError(ConfigError):
    code = "no_routable_address"
