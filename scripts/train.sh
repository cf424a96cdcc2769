#!/usr/bin/env bash
# Trains a model with TorchTitan on whatever this machine has, GPUs or the CPU, in bf16 and then in MXFP8; compares
# both.
#
#     CONFIG=train_configs/debug_deepseek_v3.toml NGPU=2 ./scripts/train.sh --training.steps=100
#
# Trailing flags go to TorchTitan. Relative paths in them and in the TOML lead from the current folder, with a TOML of
# the repository from the repository. TensorBoard is on, whatever the TOML says: its logs are what is compared.
#
# Environment:
#     CONFIG   a TOML, of the current folder or of the repository [train_configs/debug_llama4.toml]
#     NGPU     processes: one per GPU, or gloo processes on a CPU machine [1]
#     RUNS     bf16 (the config without its model converters), mxfp8 (the config as it is) or both [bf16 mxfp8]
#     OUT      folder of the runs [outputs/<config>-<time>]
#     LOG_RANK processes whose output is shown, separated by commas; OUT/<run>/logs has that of all [0]
#     DRYRUN   1: print the commands and stop [0]
#     PYTHON   a Python to be used as it is, with torch, torchtitan and what is on PYTHONPATH [set up .venv]
#     TITAN    0.2 or 0.3: which TorchTitan trains [0.2]. With 0.3, in .venv03,
#              CONFIG     a function of MODULE that gives a config [debug_deepseek_v3]
#              MODULE     TorchTitan's --module [titan_mxfp8.titan03]
#              OVERRIDES  what makes the mxfp8 run [titan_mxfp8.titan03.experts titan_mxfp8.titan03.linears]
#     WANDB_*  wandb's own. Without a login runs are logged offline; `wandb sync` uploads them later.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # after "sh script"
. "$(dirname "$(readlink -f "$0")")/launch.sh"

config=$(find_config "${CONFIG:-$default_config}")
NGPU=${NGPU:-1} RUNS=${RUNS:-bf16 mxfp8}
out=$(from_here "${OUT:-outputs/$(basename "$config" .toml)-$(date +%Y%m%d-%H%M%S)}")

torchrun_flags() { torchrun=(--standalone); }
train_runs "$config" "$out" --metrics.enable_tensorboard "$@"

if [[ $RUNS = *bf16* && $RUNS = *mxfp8* && $DRYRUN != 1 ]]; then
    python scripts/study/compare_runs.py "$out/bf16" "$out/mxfp8" --out "$out"
fi
