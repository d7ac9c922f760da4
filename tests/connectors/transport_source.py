"""A source process for the transport tests: serves a pool of known bytes until stdin ends.

transport_source.py INCARNATION NUM_BYTES TRANSPORT...
"""

import itertools
import sys
import time

import numpy as np

from diptych.connectors.transports.base import Endpoint, Runs, Transport
from diptych.connectors.transports.memory import HostMemory
from diptych.connectors.transports.nixl import NixlTransport
from diptych.connectors.transports.orders import ReadOrder
from diptych.connectors.transports.shm import ShmTransport
from diptych.connectors.transports.tcp import TcpTransport
from diptych.connectors.transports.thread import TransferThread

MAKE: dict[str, type[Transport]] = {
    "nixl": NixlTransport,
    "shm": ShmTransport,
    "tcp": TcpTransport,
}


def pattern(num_bytes: int) -> np.ndarray:
    """What the pool holds."""
    return np.random.Generator(np.random.SFC64(7)).integers(0, 256, num_bytes, np.uint8)


def read_for_ever(thread: TransferThread, endpoint: Endpoint) -> None:
    """Read another source's whole pool, again and again, until killed."""
    thread.connect("other", endpoint)
    runs = Runs.of([(0, 0, endpoint.regions["kv"])])
    for count in itertools.count():
        deadline_s = time.monotonic() + 60
        thread.read(
            ReadOrder(read_id=f"{count}", peer_id="other", runs=runs, deadline_s=deadline_s)
        )
        while not thread.take_results():
            time.sleep(0.001)
        if count == 0:
            print("done", flush=True)


def main() -> None:
    incarnation, num_bytes, *names = sys.argv[1:]
    memory = HostMemory.shared(int(num_bytes))
    memory.array[:] = pattern(int(num_bytes))
    thread = TransferThread([MAKE[name]() for name in names], memory, incarnation)
    print(thread.start().encode().hex(), flush=True)
    for line in sys.stdin:
        if line.startswith("read "):
            read_for_ever(thread, Endpoint.decode(bytes.fromhex(line[5:])))
        offset, value = map(int, line.split())
        memory.array[offset] = value
        print("done", flush=True)
    thread.close()


if __name__ == "__main__":
    main()
