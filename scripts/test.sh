#!/usr/bin/env bash
usage() {
    cat << 'TEXT'
Sets up .venv, then lints and runs all tests, two files at a time. Arguments go to pytest, which then runs its tests one
by one. Tests that need a GPU are skipped without one; scripts/test_gpu.sh runs them faster.

    ./scripts/test.sh
    ./scripts/test.sh --all    # those of minutes too, which CI leaves out
    ./scripts/test.sh tests/test_ops.py -k bias
    TITAN=0.3 ./scripts/test.sh    # sets up .venv03, then runs the tests of the adapter for TorchTitan 0.3, tests/titan03
TEXT
}
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # after "sh script"
set -euo pipefail
if [ "${1:-}" = --help ] || [ "${1:-}" = -h ]; then
    usage
    exit
fi
cd "$(dirname "$0")/.."
[ "${TITAN:-0.2}" != 0.2 ] || EXTRA=hf # the tests of Transformers are among those of TorchTitan 0.2.2
. scripts/setup.sh
if [ -n "${PYTHONDONTWRITEBYTECODE:-}" ]; then
    # Nothing is compiled when it is installed. Every process of the tests, of which there are hundreds, would compile
    # torch and TorchTitan anew as it starts: 6 of 10 s. The bytecode lies in the environment, beside no source.
    unset PYTHONDONTWRITEBYTECODE
    export PYTHONPYCACHEPREFIX=$PWD/$venv/bytecode
fi
ruff check .
ruff format --check .
if [ "$*" = "" ] || [ "$*" = --all ]; then
    export OMP_NUM_THREADS=1 # threads of two tests would wait for each other
    set -- "$@" --numprocesses=2 --dist=loadfile --no-loadscope-reorder # in the order of tests/conftest.py
fi
exec "$program" -m pytest "$@"
