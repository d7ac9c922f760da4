"""A store node's answers, looked at before anything is done with them.

A node may be broken, of another version, or a stranger that entered itself in the registry. What
cannot be an answer to the question is the node's failure, never its caller's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from diptych.errors import TransferError
from diptych.proto import kvstore_pb2 as pb

T = TypeVar("T")


def one_each(answers: Sequence[T], num_asked: int) -> Sequence[T]:
    """The answers, one for each item of the question.

    Raises:
        TransferError: there are more, or fewer.
    """
    if len(answers) != num_asked:
        raise TransferError(f"it gave {len(answers)} answers to {num_asked} questions")
    return answers


def reserved(
    answer: pb.PutStartResponse, sizes: Sequence[int], pool_bytes: int
) -> Sequence[pb.PutReservation]:
    """The reservations of objects of `sizes`: of just that size, and within the pool.

    Raises:
        TransferError: they are not.
    """
    reservations = one_each(answer.reservations, len(sizes))
    for reservation, num_bytes in zip(reservations, sizes, strict=True):
        if reservation.status == pb.ITEM_STATUS_OK:
            if reservation.placement.num_bytes != num_bytes:
                raise TransferError("it gave room of another size than was asked for")
            _check_place(reservation.placement, pool_bytes)
    return reservations


def found(answer: pb.GetResponse, num_keys: int, pool_bytes: int) -> Sequence[pb.GetResult]:
    """What was found of `num_keys` keys: within the pool.

    Raises:
        TransferError: it is not.
    """
    results = one_each(answer.results, num_keys)
    for result in results:
        if result.status == pb.ITEM_STATUS_OK:
            _check_place(result.placement, pool_bytes)
    return results


def _check_place(placement: pb.Placement, pool_bytes: int) -> None:
    if placement.offset_bytes + placement.num_bytes > pool_bytes:
        raise TransferError("it named a place outside its pool")
