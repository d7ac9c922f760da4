"""TCP sockets as our byte streams use them."""

from __future__ import annotations

import socket

# A peer whose host or route is gone sends no FIN: it is noticed after about 10 + 3 x 5 s.
_IDLE_S, _INTERVAL_S, _PROBES = 10, 5, 3


def tune(connection: socket.socket) -> None:
    """Send at once, and let go of a peer that vanished: it would keep its place among the clients
    for ever."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _INTERVAL_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
