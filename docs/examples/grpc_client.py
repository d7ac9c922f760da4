"""Ask a Diptych router over gRPC and print the answer as it comes.

    diptych up --grpc-port 50051
    python docs/examples/grpc_client.py 127.0.0.1:50051 "What is the capital of France?"

The contract is proto/inference.proto. In other languages, generate a client from it, or ask the
server itself: it has reflection.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

import grpc

from diptych.proto import common_pb2, inference_pb2, inference_pb2_grpc


def generate(
    channel: grpc.Channel,
    question: str,
    *,
    model: str = "",
    api_key: str = "",
    max_tokens: int = 128,
) -> Iterator[inference_pb2.GenerateResponse]:
    """The pieces of one chat answer; the last has `finish_reason` and `usage`."""
    request = inference_pb2.GenerateRequest(
        model=model,  # empty: the default model
        chat=inference_pb2.ChatPrompt(
            messages=[inference_pb2.ChatMessage(role="user", content=question)]
        ),
        sampling=common_pb2.SamplingParams(temperature=0.0, max_tokens=max_tokens),
    )
    metadata = [("authorization", f"Bearer {api_key}")] if api_key else []
    # leaving the loop early cancels the call, and with it the work on every machine
    yield from inference_pb2_grpc.InferenceStub(channel).Generate(
        request, metadata=metadata, timeout=60
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("address", help="host:port of the router's gRPC API")
    parser.add_argument("question")
    parser.add_argument("--model", default="")
    parser.add_argument("--api-key", default="")
    args = parser.parse_args()
    with grpc.insecure_channel(args.address) as channel:
        try:
            for piece in generate(channel, args.question, model=args.model, api_key=args.api_key):
                sys.stdout.write(piece.text)
                sys.stdout.flush()
        except grpc.RpcError as error:
            sys.stderr.write(f"{error.code().name}: {error.details()}\n")
            return 1
    sys.stdout.write(f"\n[{piece.usage.completion_tokens} tokens]\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
