"""A source process for the transport tests: serves a pool of known bytes until stdin ends.

transport_source.py INCARNATION NUM_BYTES TRANSPORT...
"""

import itertools
import os
import sys
import time
from pathlib import Path

import numpy as np

from diptych.connectors.transports.base import Endpoint, Runs
from diptych.connectors.transports.choose import TransportSettings, open_transports
from diptych.connectors.transports.memory import HostMemory
from diptych.connectors.transports.orders import ReadOrder
from diptych.connectors.transports.tcp_wire import TlsFiles
from diptych.connectors.transports.thread import TransferThread


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


def tls_files() -> TlsFiles | None:
    """Certificates for the source, in a folder that the environment names."""
    folder = os.environ.get("SOURCE_TLS")
    if folder is None:
        return None
    files = {name: Path(folder, f"{name}.pem") for name in ("certificate", "key", "authority")}
    return TlsFiles(**files)


def main() -> None:
    incarnation, num_bytes, *names = sys.argv[1:]
    memory = HostMemory.shared(int(num_bytes))
    memory.array[:] = pattern(int(num_bytes))
    settings = TransportSettings(tls=tls_files())
    thread = TransferThread(open_transports(names, settings), memory, incarnation)
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
