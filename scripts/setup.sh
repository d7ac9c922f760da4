#!/usr/bin/env bash
# Make .venv and install Diptych into it: setup.sh run | test
# torch first and on its own, so that nothing pulls a CUDA build onto a machine without a GPU.
set -euo pipefail
cd "$(dirname "$0")/.."
kind=${1:?run or test}
python=${PYTHON:-python3}
torch_pin=$(sed -n 's/^torch==//p' constraints/cpu.txt)
index=${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}
say() { printf 'setup: %s\n' "$*" >&2; }

[ "$(uname -s)" = Linux ] || { say "only Linux is supported, this is $(uname -s)"; exit 1; }
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  { say "Python 3.11 or newer is needed; set PYTHON=/path/to/python3.11"; exit 1; }
[ -x .venv/bin/python ] || { say "creating .venv"; "$python" -m venv .venv; }
pip=(.venv/bin/python -m pip --quiet --disable-pip-version-check)

has_gpu() { compgen -G '/dev/nvidia[0-9]*' >/dev/null; }

install_torch() {
  .venv/bin/python -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)' && return
  if has_gpu; then
    say "installing torch for the GPU (large)"
    "${pip[@]}" install 'torch>=2.11'
    return
  fi
  # A CPU wheel that lies on disk (pip's find-links) needs no network.
  say "installing torch $torch_pin for CPUs"
  if "${pip[@]}" download --no-index --no-deps -d .venv/torch "torch==$torch_pin" >/dev/null 2>&1 &&
    compgen -G '.venv/torch/torch-*+cpu*' >/dev/null; then
    "${pip[@]}" install --no-deps .venv/torch/torch-*+cpu*.whl
    rm -rf .venv/torch
    return
  fi
  rm -rf .venv/torch
  "${pip[@]}" install --no-deps --index-url "$index" "torch==$torch_pin" || {
    say "no CPU build of torch $torch_pin at $index; say where one is and run again:"
    say "  TORCH_INDEX=URL of a package index with CPU builds, or PIP_FIND_LINKS=folder with such a wheel"
    exit 1
  }
}

install_torch
constraints=(-c constraints/cpu.txt)
has_gpu && constraints=()
say "installing diptych ($kind)"
case $kind in
  run) "${pip[@]}" install "${constraints[@]}" -e '.[embedded]' ;;
  test)
    "${pip[@]}" install "${constraints[@]}" -e '.[test,lint]'
    # The real NIXL, on CPUs too. Without its dependencies: they would bring another torch.
    nixl=$(grep '^nixl-' constraints/cpu.txt)
    "${pip[@]}" install --no-deps "$nixl" || say "$nixl does not install here: its tests are skipped"
    ;;
  *) say "usage: setup.sh run|test"; exit 2 ;;
esac
say "done"
