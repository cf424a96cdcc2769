#!/usr/bin/env bash
# Sets up .venv, then runs a convergence study: every recipe with every seed, with the flags of
# scripts/study/converge.py.
#
#     JOBS=2 ./scripts/converge.sh train_configs/moe_100m.toml --recipes bf16 mxfp8_2d --seeds 0 1 -- --training.steps=99
#
# A study that is started again skips finished runs, and continues others from their checkpoint.
#
# Environment:
#     JOBS    runs at a time; more than GPUs share them [1]
#     NGPU    processes of one run, one per GPU [1]
#     PYTHON  a Python to be used as it is [set up .venv]
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # after "sh script"
. "$(dirname "$(readlink -f "$0")")/launch.sh"
root=$PWD
. scripts/setup.sh
check_gpu
export WANDB_PROJECT=${WANDB_PROJECT:-titan_mxfp8} # as scripts/launch.sh does
cd "$here"
exec "$program" "$root/scripts/study/converge.py" "$@"
