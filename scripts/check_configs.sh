#!/usr/bin/env bash
# Dry-runs configs at their full number of GPUs, on one CPU process: mesh, sharding, what is converted, memory per GPU,
# and what MXFP8 can bring. Without a config all of train_configs/.
#
#     ./scripts/check_configs.sh train_configs/llama4_17bx16e_8x8.toml --cluster.gpu=H200 --training.local_batch_size=2
#
# The number of GPUs and their kind are [cluster] nodes, gpus_per_node and gpu. Other flags override the config, as they
# do in training; --model.converters= gives its bf16 half. Neither tokenizer nor data are needed. A config that cannot
# be trained is reported with the reason, and the exit status is 1.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # after "sh script"
. "$(dirname "$(readlink -f "$0")")/launch.sh"
[ "$TITAN" = 0.2 ] || fail 2 "configs of TorchTitan 0.3 cannot be checked: leave TITAN out to check those of 0.2.2"
root=$PWD
. scripts/setup.sh
cd "$here"
CUDA_VISIBLE_DEVICES='' HIP_VISIBLE_DEVICES='' exec "$program" "$root/scripts/check_configs.py" "$@"
