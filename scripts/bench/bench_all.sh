#!/usr/bin/env bash
# Fills one folder with the benchmarks of this machine's GPU, or GPUs, within 10 minutes. Called again with the same OUT
# it goes on: parts that are finished are not repeated, of the others what is missing.
#
#     OUT=results/2027-01-31_h200_bench MINUTES=20 PARTS="grouped_mm kernels" ./scripts/bench/bench_all.sh
#
# The exit status is 0 if no part failed.
#
# Environment:
#     OUT      folder of the results [results/<date>_<GPUs>x<GPU>_bench]
#     PARTS    of: grouped_mm kernels scaling moe_layer [all]
#     MINUTES  for all of them: a part that is to be cut short keeps what it has measured by then [10]
#     QUICK    1: shorter blocks, fewer shapes
#     SHAPES   those of grouped_mm, kernels and scaling, as M,N,K,G or by name
#     DEVICE   cuda or cpu, which with small SHAPES tries it [cuda]
#     PYTHON   a Python to be used as it is [set up .venv]
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # after "sh script"
. "$(dirname "$(readlink -f "$0")")/../launch.sh"
takes DEVICE 'cuda|cpu' "cuda or cpu"
takes MINUTES "$minutes" "a number of minutes"
takes QUICK '[01]' "0 or 1"
part='(grouped_mm|kernels|scaling|moe_layer)'
takes PARTS "$part( $part)*" "grouped_mm, kernels, scaling and moe_layer, with spaces between them"
DEVICE=${DEVICE:-cuda} MINUTES=${MINUTES:-10} QUICK=${QUICK:-0} PARTS=${PARTS:-grouped_mm kernels scaling moe_layer}
. scripts/setup.sh
machine="import sys, torch
if sys.argv[1] == 'cpu': print('1 cpu')
elif not torch.cuda.is_available(): sys.exit(1)
else: print(torch.cuda.device_count(), torch.cuda.get_device_name().lower().replace('nvidia ', '').split()[0])"
found=$(python -c "$machine" "$DEVICE") ||
    fail 1 "no GPU here that torch can use; DEVICE=cpu with small SHAPES tries the benchmarks"
read -r gpus gpu <<< "$found"
[ "$gpus" = 1 ] && count='' || count=${gpus}x
out=results/$(date +%Y-%m-%d)_$count${gpu}_bench
[ -z "${OUT:-}" ] || out=$(from_here "$OUT")
mkdir -p "$out/logs"
end=$((SECONDS + $(seconds "$MINUTES")))
failed=0 quick=() shapes=()
[ "$QUICK" != 1 ] || quick=(--quick)
# shellcheck disable=SC2206 # several words
[ -z "${SHAPES:-}" ] || shapes=(--shapes ${SHAPES})

# part PERCENT COMMAND...: fills the folder of $name for so much of the time that is left, unless an earlier call has.
part() {
    local limit=$(((end - SECONDS) * $1 / 100))
    shift
    if [ -e "$out/logs/$name.done" ]; then
        echo "== $name: finished by an earlier call"
        return
    fi
    echo "== $name: $*"
    limited "$limit" "$out/logs/$name.log" "$@"
    case $result in
        passed) touch "$out/logs/$name.done" ;;
        FAILED*) failed=1 && echo "== $name: $result" >&2 ;;
        *) echo "== $name: $result; the same command goes on" ;;
    esac
}

for name in $PARTS; do
    grouped_mm=("$program" scripts/bench/bench_grouped_mm.py --out "$out/$name" --device "$DEVICE" "${shapes[@]}")
    case $name in
        grouped_mm) part 30 "${grouped_mm[@]}" "${quick[@]}" ;;
        kernels) part 25 "${grouped_mm[@]}" "${quick[@]}" --passes --recipes mxfp8_2d_rebased mxfp8_2d mxfp8 ;;
        # short blocks: many rows, to see where cost stops being linear
        scaling) part 30 "${grouped_mm[@]}" --quick --scaling ;;
        moe_layer) part 85 "$program" -m torch.distributed.run --standalone --nproc-per-node="$gpus" \
            scripts/bench/bench_moe_layer.py --out "$out/$name" --device "$DEVICE" --quick ;;
    esac
done
if [ -e "$out/kernels/data.csv" ] && [ "$DEVICE" = cuda ]; then
    python scripts/bench/roofline.py passes "$out" || echo "bench_all.sh: no roofline" >&2 # of a GPU that no config names
fi
exit "$failed"
