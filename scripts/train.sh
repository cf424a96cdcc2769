#!/usr/bin/env bash
usage() {
    cat << 'TEXT'
Trains a model with TorchTitan on whatever this machine has: GPUs, else the CPU.

    ./scripts/train.sh                                    # Llama4 debug model, bf16 and then MXFP8, and a picture of both
    CONFIG=train_configs/debug_deepseek_v3.toml NGPU=2 ./scripts/train.sh --training.steps=100
    RUNS=mxfp8 ./scripts/train.sh --parallelism.expert_parallel_degree=2   # only the config as it is

Environment:
    CONFIG   a TOML of train_configs/ [train_configs/debug_llama4.toml]
    NGPU     processes: one per GPU, or gloo processes on a CPU machine [1]
    RUNS     bf16 (the config without its model converters), mxfp8 (the config as it is) or both [bf16 mxfp8]
    OUT      folder of the runs [outputs/<config>-<time>]
    DRYRUN   1: print the commands and stop
    WANDB_*  wandb's own. Without a login runs are logged offline; `wandb sync` uploads them later.
Trailing flags go to TorchTitan.
TEXT
}
set -euo pipefail
if [ "${1:-}" = --help ] || [ "${1:-}" = -h ]; then
    usage
    exit
fi
cd "$(dirname "$0")/.."

config=${CONFIG:-train_configs/debug_llama4.toml}
ngpu=${NGPU:-1}
runs=${RUNS:-bf16 mxfp8}
out=${OUT:-outputs/$(basename "$config" .toml)-$(date +%Y%m%d-%H%M%S)}
[ -f "$config" ] || { echo "train.sh: CONFIG=$config is no file; ls train_configs" >&2; exit 2; }

[ "${DRYRUN:-0}" = 1 ] || . scripts/setup.sh
# Two processes with as many threads as cores each would fight for them.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(( ($(getconf _NPROCESSORS_ONLN) + ngpu - 1) / ngpu ))}

for run in $runs; do
    flags=(--job.config_file="$config" --job.dump_folder="$out/$run")
    case $run in
        bf16) flags+=(--model.converters=) ;;
        mxfp8) ;;
        *) echo "train.sh: RUNS takes bf16 and mxfp8, not '$run'" >&2; exit 2 ;;
    esac
    command=(torchrun --standalone --nproc-per-node="$ngpu" --local-ranks-filter=0 -m torchtitan.train "${flags[@]}" "$@")
    echo "+ WANDB_RUN_NAME=${WANDB_RUN_NAME:-$(basename "$out")-$run} ${command[*]}"
    [ "${DRYRUN:-0}" = 1 ] && continue
    WANDB_RUN_NAME=${WANDB_RUN_NAME:-$(basename "$out")-$run} "${command[@]}"
done

if [ "$runs" = "bf16 mxfp8" ] && [ "${DRYRUN:-0}" != 1 ]; then
    python scripts/compare_runs.py "$out/bf16" "$out/mxfp8" --out "$out"
fi
