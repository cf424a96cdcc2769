#!/usr/bin/env bash
# Sets up .venv, then lints and runs the tests, two files at a time. Arguments go to pytest, which then runs them one by
# one: ./scripts/test.sh tests/test_ops.py -k bias
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/setup.sh
ruff check .
ruff format --check .
if [ $# = 0 ]; then
    export OMP_NUM_THREADS=1 # threads of two tests would wait for each other
    set -- --numprocesses=2 --dist=loadfile
fi
exec python -m pytest "$@"
