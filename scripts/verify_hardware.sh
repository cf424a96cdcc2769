#!/usr/bin/env bash
# What the first owner of a GPU runs that this project never ran on: the doctor, all tests that need a GPU, the
# benchmark tables in their quick form, and both debug models trained in bf16 and MXFP8. Ends with one archive to attach
# to an issue.
#
#     PYTHON=python3 PYTHONPATH=wheels ./scripts/verify_hardware.sh    # or without: sets up .venv
#
# With the same OUT it goes on with other STEPS. The exit status is 0 if all steps passed.
#
# Environment:
#     STEPS    of: doctor models tests benchmarks [all]; those of earlier calls with the same OUT stay in the archive
#     OUT      folder of the logs and tables [outputs/verify-<time>]
#     MINUTES  after which the step that runs is cut off, and those behind it are left out [15]
#     PYTHON   a Python to be used as it is, with torch and what is on PYTHONPATH [set up .venv]
#     JOBS     as in test_gpu.sh
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # after "sh script"
. "$(dirname "$(readlink -f "$0")")/launch.sh"
out=$(from_here "${OUT:-outputs/verify-$(date +%Y%m%d-%H%M%S)}")
out=${out%/} # which a shell completes a folder with: the archive would be OUT/.tar.gz
step='(doctor|models|tests|benchmarks)'
takes STEPS "$step( $step)*" "doctor, models, tests and benchmarks, with spaces between them"
takes MINUTES "$minutes" "a number of minutes"
STEPS=${STEPS:-doctor models tests benchmarks} MINUTES=${MINUTES:-15}
. scripts/setup.sh
mkdir -p "$out"
end=$((SECONDS + $(seconds "$MINUTES")))
failed=0

# run NAME COMMAND...: its output on the terminal and in NAME.log, a row in NAME.row; for as long as there is time.
run() {
    local name=$1 begin=$SECONDS
    shift
    echo "== $name: $*"
    limited "$((end - SECONDS))" "$out/$name.log" "$@"
    [ "$result" = passed ] || failed=1
    echo "| $name | $result | $((SECONDS - begin)) |" > "$out/$name.row"
}

gpu=1
if ! python -c "import torch; raise SystemExit(not torch.cuda.is_available())"; then
    gpu=0 STEPS=doctor
fi
for step in $STEPS; do
    case $step in
        doctor) run doctor "$program" -m titan_mxfp8.doctor ;;
        tests) run tests scripts/test_gpu.sh ;;
        benchmarks)
            run benchmarks env OUT="$out/bench" QUICK=1 PARTS="kernels grouped_mm" scripts/bench/bench_all.sh
            ;;
        models)
            for model in llama4 deepseek_v3; do
                run "model_$model" env CONFIG="$PWD/train_configs/debug_$model.toml" OUT="$out/$model" \
                    RUNS="bf16 mxfp8" NGPU=1 scripts/train.sh --metrics.no-enable_wandb --training.steps=40
            done
            ;;
    esac
done
{
    echo "| step | result | seconds |"
    echo "|---|---|---|"
    cat "$out"/*.row
} | tee "$out/summary.md"
# what is measured and said, not checkpoints and profiles
(cd "$out" && find . \( -name '*.md' -o -name '*.log' -o -name '*.csv' -o -name '*.json' -o -name '*.png' \) -size -4M |
    tar -czf "$out.tar.gz" --files-from=-)
[ "$gpu" = 1 ] || fail 1 "no GPU here that torch can use: only the doctor was run, and nothing verified"
echo "attach $out.tar.gz to an issue"
exit "$failed"
