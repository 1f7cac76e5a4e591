#!/usr/bin/env bash
# RL in bf16 and in fp16 on this machine's GPU; see benchmarks/gpu_sanity.py.
set -euo pipefail
cd "$(dirname "$0")/.."
[[ ! -d .venv ]] || export PATH="$PWD/.venv/bin:$PATH"
PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}" exec python benchmarks/gpu_sanity.py "$@"
