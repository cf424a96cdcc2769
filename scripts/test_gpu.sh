#!/usr/bin/env bash
# Sets up .venv, then runs the tests that need a GPU, several at a time on one card; after them, one by one, those
# marked `alone`, which hold multiprocessors or much memory. Lists the slowest ones. Arguments go to pytest.
#
#     ./scripts/test_gpu.sh
#     JOBS=2 ./scripts/test_gpu.sh -k quantize
#     TITAN=0.3 ./scripts/test_gpu.sh    # sets up .venv03, then runs those of the adapter for TorchTitan 0.3
#
# Environment:
#     JOBS   processes, each with its share of the card's memory [6]
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # after "sh script"
. "$(dirname "$(readlink -f "$0")")/launch.sh"
takes JOBS "$count" "a number of processes"
JOBS=${JOBS:-6}
. scripts/setup.sh
python -c "import torch; raise SystemExit(not torch.cuda.is_available())" ||
    fail 1 "no GPU here that torch can use; nothing was tested"
export OMP_NUM_THREADS=1 # threads of several tests would wait for each other
files=(tests/test_backends.py tests/test_gpu_*.py)
[ "$TITAN" = 0.2 ] || files=(tests/titan03/test_gpu_*.py)
for argument in "$@"; do
    case $argument in tests/*) files=() ;; esac # the arguments say which
done

beside=0 alone=0
python -m pytest --durations=15 -m "not alone" --numprocesses="$JOBS" --dist=worksteal "$@" "${files[@]}" || beside=$?
python -m pytest --durations=15 -m alone "$@" "${files[@]}" || alone=$?
case $beside-$alone in # 5: the arguments left no test
    0-5) ;;
    0-* | 5-*) exit "$alone" ;;
    *) exit "$beside" ;;
esac
