"""What both fronts share: which models are served, to whom, and under which ids."""

from __future__ import annotations

from dataclasses import dataclass

from diptych.clock import Clock
from diptych.errors import ModelNotFoundError
from diptych.services.router.api_keys import ApiKeys
from diptych.services.router.request_ids import InternalIds


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """`models`: names that this router answers to, the default first."""

    models: tuple[str, ...]
    keys: ApiKeys
    ids: InternalIds
    clock: Clock

    def model(self, name: str | None) -> str:
        """The model that a request names; the default where it names none.

        Raises:
            ModelNotFoundError: it is not served here.
        """
        if not name:
            return self.models[0]
        if name not in self.models:
            raise ModelNotFoundError(f"The model `{name[:200]}` does not exist.", param="model")
        return name
