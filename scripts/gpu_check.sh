#!/usr/bin/env bash
# The precision grid and gradient fidelity on this machine's GPU; see benchmarks/gpu_check.py.
set -euo pipefail
cd "$(dirname "$0")/.."
[[ ! -d .venv ]] || export PATH="$PWD/.venv/bin:$PATH"
PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}" exec python benchmarks/gpu_check.py "$@"
