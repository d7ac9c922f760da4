"""The DirectConnector's settings, as `kv_connector_extra_config` carries them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diptych.connectors.settings import fields_of
from diptych.connectors.transports.choose import TransportSettings
from diptych.connectors.transports.tcp_wire import TlsFiles
from diptych.errors import ConfigError

NAME = "DirectConnector"


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectSettings:
    """How KV goes from worker to worker. Times are in seconds, on each side's own clock.

    Attributes:
        transports: names in order of preference, comma-separated, or `auto`.
        required: an engine for whose pool no transport works does not start; else it goes on
            without direct hand-offs.
        host, tcp_port, grpc_port, advertised_host: where readers are served (0: a free port).
        tls_certificate, tls_key, tls_authority: PEM files; with them nothing travels in the clear.
        tls_name: that a peer's certificate must bear; its address if empty.
        verify_kv: compare checksums of all blocks before the KV is used; None: but over links that
            read a GPU's memory where it lies.
        shortcut: engines of one host speak to each other past the services, where they can.
        repeat_s: between repetitions of what was not confirmed.
        hold_s: prefill keeps a computed prompt for so long while no reader has room for it; then
            the reader is sent to the store. Only where both have one.
        lease_s: prefill keeps announced blocks for so long after the last sign of its reader.
        reserve_s: decode waits for so long for room, once the KV is announced.
        read_s: for one range to arrive.
        read_tries: for one range, where a read ended before its time.
        silence_s: of a prefill worker that is taken for lost.
        verdict_s: for prefill's word that what was read had stayed whole.
        test_s: for the test of one transport to a peer.
    """

    transports: str = "auto"
    required: bool = False
    host: str = "127.0.0.1"
    tcp_port: int = 0
    grpc_port: int = 0
    advertised_host: str = ""
    tls_certificate: str = ""
    tls_key: str = ""
    tls_authority: str = ""
    tls_name: str = ""
    verify_kv: bool | None = None
    shortcut: bool = True
    repeat_s: float = 0.1
    hold_s: float = 5.0
    lease_s: float = 30.0
    reserve_s: float = 20.0
    read_s: float = 10.0
    read_tries: int = 2
    silence_s: float = 5.0
    verdict_s: float = 5.0
    test_s: float = 5.0

    @classmethod
    def of(cls, settings: dict[str, Any]) -> DirectSettings:
        """Those of a connector's settings that are these.

        Raises:
            ConfigError: one has the wrong type, or makes no sense.
        """
        return cls(**fields_of(cls, settings))

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if type(field.default) is float and value <= 0:
                raise ConfigError(f"{field.name} must be positive, not {value!r}")
        if self.read_tries < 1:
            raise ConfigError(f"read_tries must be at least 1, not {self.read_tries}")
        files = (self.tls_certificate, self.tls_key, self.tls_authority)
        if any(files) and not all(files):
            raise ConfigError("tls_certificate, tls_key and tls_authority come together")

    @property
    def transport_names(self) -> list[str]:
        return [name.strip() for name in self.transports.split(",") if name.strip()]

    def for_transports(self, device: str) -> TransportSettings:
        """Where this process listens for readers; `device` is the KV pool's."""
        tls = None
        if self.tls_certificate:
            tls = TlsFiles(
                certificate=Path(self.tls_certificate),
                key=Path(self.tls_key),
                authority=Path(self.tls_authority),
                server_name=self.tls_name or None,
            )
        return TransportSettings(
            device=device,
            host=self.host,
            tcp_port=self.tcp_port,
            grpc_port=self.grpc_port,
            advertised_host=self.advertised_host or None,
            tls=tls,
        )
