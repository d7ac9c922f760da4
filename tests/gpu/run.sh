#!/usr/bin/env bash
# Everything that a GPU host checks and measures, from the repository root. Results go to $OUT.
#   DIPTYCH_TEST_MODEL  directory of SmolLM2 (safetensors), for the test of a real answer
#   PYTHONPATH          may bring packages that the host lacks
set -uo pipefail
out=${OUT:-bench/results}
export PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH} PYTHONSAFEPATH=1
python3 -m pytest tests/gpu tests/kernels -q -n "${JOBS:-6}" -W default -p no:cacheprovider \
  --tb=short --durations=5
status=$?
python3 -c 'import sys; from diptych.cli import main; sys.exit(main())' \
  bench kernels --result-dir "$out" || status=1
exit $status
