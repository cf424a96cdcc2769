#!/usr/bin/env bash
# Sets up .venv, then lints and runs the tests, two files at a time. Arguments go to pytest, which then runs its tests
# one by one. Tests that need a GPU are skipped without one; scripts/test_gpu.sh runs them faster.
#
#     ./scripts/test.sh           # what CI runs
#     ./scripts/test.sh --fast    # without those that start processes, most of which train
#     ./scripts/test.sh --all     # those of minutes too, which CI leaves out
#     ./scripts/test.sh tests/test_ops.py -k bias
#     TITAN=0.3 ./scripts/test.sh    # sets up .venv03, then runs tests/titan03, of the adapter for TorchTitan 0.3
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # after "sh script"
. "$(dirname "$(readlink -f "$0")")/launch.sh"
begin=$SECONDS
case "$TITAN $*" in
    "0.2 ") takes="7 to 15 minutes on two cores" ;;
    "0.2 --fast") takes="3 minutes on two cores" ;;
    "0.2 --all") takes="30 minutes on two cores" ;;
    "0.3 ") takes="2 to 3 minutes on two cores" ;;
    *) takes="" ;;
esac
echo "test.sh: ${takes:+this takes $takes, and }a first set-up a minute more"
[ "$TITAN" != 0.2 ] || EXTRA=hf # the tests of Transformers are among those of TorchTitan 0.2.2
. scripts/setup.sh
if [ -n "${PYTHONDONTWRITEBYTECODE:-}" ]; then
    # Nothing is compiled when it is installed. Every process of the tests would compile torch and TorchTitan anew as it
    # starts: 6 of 10 s. The bytecode lies in the environment, beside no source.
    unset PYTHONDONTWRITEBYTECODE
    export PYTHONPYCACHEPREFIX=$PWD/$venv/bytecode
fi
ruff check .
ruff format --check .
case "$*" in
    "" | --fast | --all)
        export OMP_NUM_THREADS=1 # threads of two tests would wait for each other
        set -- "$@" --numprocesses=2 --dist=loadfile --no-loadscope-reorder # in the order of tests/conftest.py
        ;;
esac
status=0
"$program" -m pytest "$@" || status=$?
echo "test.sh: took $((SECONDS - begin)) s"
exit "$status"
