"""What each tenant keeps in a tier, and how much it may."""

from __future__ import annotations

from collections import defaultdict

from diptych.services.kvstore.eviction import EvictionOrder
from diptych.services.kvstore.object_types import TableObject


class TenantBooks:
    """Bytes by tenant. The nameless tenant (no API keys are in use) has the whole tier.

    A tenant over its quota makes room among its own objects; the others never notice.
    """

    def __init__(self, tier_bytes: int, quota: float) -> None:
        self._quota_bytes = int(tier_bytes * quota)
        self._used: dict[str, int] = defaultdict(int)
        self._orders: dict[str, EvictionOrder[TableObject]] = {}

    @property
    def used_bytes(self) -> dict[str, int]:
        """By tenant, those that hold something."""
        return dict(self._used)

    def over_bytes(self, tenant: str, num_bytes: int) -> int:
        """How far `num_bytes` more would take the tenant over its quota; at most 0 within it."""
        if not tenant:
            return 0
        return self._used.get(tenant, 0) + num_bytes - self._quota_bytes

    def charge(self, tenant: str, num_bytes: int) -> None:
        """Add bytes, as the tier rounds them."""
        self._used[tenant] += num_bytes

    def refund(self, tenant: str, num_bytes: int) -> None:
        """Take bytes back."""
        self._used[tenant] -= num_bytes
        if not self._used[tenant]:
            del self._used[tenant]
            self._orders.pop(tenant, None)

    def order(self, tenant: str) -> EvictionOrder[TableObject]:
        """The tenant's own objects in the order in which they go."""
        return self._orders.setdefault(tenant, EvictionOrder())
