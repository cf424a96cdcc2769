#!/usr/bin/env bash
# Sets up .venv, then runs a convergence study: JOBS=2 ./scripts/converge.sh train_configs/moe_100m.toml --help
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/setup.sh
exec python scripts/converge.py "$@"
