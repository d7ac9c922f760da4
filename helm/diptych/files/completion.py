"""One completion through the router, and proof that its KV went from prefill to decode.

Environment: ROUTER (URL), DECODE (host:port of the decode pool's admin ports), API_KEYS (a file, or
empty).
"""

import json
import os
import socket
import sys
import time
import urllib.request
import uuid
from pathlib import Path

METRIC = "vllm:prompt_tokens_by_source_total"
MOVED = 'source="external_kv_transfer"'


def main() -> None:
    """Fail unless the answer is whole and its prompt was not computed by the decode pool."""
    model = call("/v1/models")["data"][0]["id"]
    before = moved_tokens()
    # never the same twice: a prefix cache would leave nothing to move
    body = {
        "model": model,
        "prompt": f"Request {uuid.uuid4()}: hello, my name is",
        "max_tokens": 4,
        "temperature": 0,
        "ignore_eos": True,
    }
    answer = call("/v1/completions", body)
    print(json.dumps(answer))
    if answer["usage"]["completion_tokens"] != 4:
        sys.exit("the answer is not whole")
    for _ in range(20):
        moved = moved_tokens() - before
        if moved >= answer["usage"]["prompt_tokens"] - 1:
            print(f"{moved:.0f} prompt tokens came over the store")
            return
        time.sleep(0.5)
    sys.exit(f"the decode pool computed the prompt itself: {moved:.0f} tokens came over the store")


def call(path: str, body: object = None) -> dict:
    headers = {"Content-Type": "application/json"}
    if os.environ.get("API_KEYS"):
        first = Path(os.environ["API_KEYS"]).read_text().split()[0]
        headers["Authorization"] = f"Bearer {first.partition(':')[2]}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(os.environ["ROUTER"] + path, data, headers)
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)


def moved_tokens() -> float:
    """Prompt tokens that all decode workers have loaded from the store so far."""
    host, _, port = os.environ["DECODE"].rpartition(":")
    found = socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_STREAM)
    total = 0.0
    for address in {entry[4][0] for entry in found}:
        with urllib.request.urlopen(f"http://{address}:{port}/metrics", timeout=10) as response:
            lines = response.read().decode().splitlines()
        total += sum(float(line.rpartition(" ")[2]) for line in lines if is_moved(line))
    return total


def is_moved(line: str) -> bool:
    return line.startswith(METRIC) and MOVED in line


main()
