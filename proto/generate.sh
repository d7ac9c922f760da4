#!/usr/bin/env bash
# Regenerate the committed gRPC code beside the .proto files (or under OUT, for the test that compares).
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-src}
python=${PYTHON:-python3}
"$python" -P -m grpc_tools.protoc -I src --python_out="$out" --pyi_out="$out" --grpc_python_out="$out" \
  src/diptych/proto/{common,inference,worker,kvstore,transfer}.proto
