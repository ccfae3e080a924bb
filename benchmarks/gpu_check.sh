#!/usr/bin/env bash
# Everything that needs a GPU, in one command: see gpu_check.py.
set -euo pipefail
cd "$(dirname "$0")/.."
exec python benchmarks/gpu_check.py --device "${DEVICE:-cuda}" "$@"
