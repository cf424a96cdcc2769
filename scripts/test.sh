#!/usr/bin/env bash
# Sets up .venv, then lints and runs the tests. Arguments go to pytest: ./scripts/test.sh tests/test_ops.py -k bias
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/setup.sh
ruff check .
ruff format --check .
exec python -m pytest "$@"
