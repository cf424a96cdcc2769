#!/usr/bin/env bash
# Sets up .venv, then runs a convergence study: JOBS=2 ./scripts/converge.sh train_configs/moe_100m.toml --help
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # after "sh script"
set -euo pipefail
here=$PWD
cd "$(dirname "$0")/.."
root=$PWD
. scripts/launch.sh
. scripts/setup.sh
check_gpu
export WANDB_PROJECT=${WANDB_PROJECT:-titan_mxfp8} # as scripts/launch.sh does
cd "$here"
exec "$program" "$root/scripts/study/converge.py" "$@"
