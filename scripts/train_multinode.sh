#!/usr/bin/env bash
# Trains a model with TorchTitan on several machines: run the same command on each of them. They find each other at
# RDZV_ENDPOINT, an address and free port of one of them. First run ./scripts/check_configs.sh CONFIG on one machine.
#
#     NNODES=8 RDZV_ENDPOINT=node01:29500 CONFIG=train_configs/llama4_17bx16e_8x8.toml ./scripts/train_multinode.sh
#
# With checkpoint.enable it goes on from the last checkpoint: after a process has died, or when the same command with
# the same OUT is given again. After a machine has died give it on another one: the rest wait for it; after that of
# RDZV_ENDPOINT on all machines. Trailing flags go to TorchTitan; relative paths lead from the current folder, with a
# TOML of the repository from the repository.
#
# Environment:
#     NNODES         machines [1]
#     NGPU           processes on each: one per GPU, or gloo processes on CPU machines [8]
#     RDZV_ENDPOINT  HOST:PORT of one of the machines [localhost:29500]
#     RDZV_ID        name of the job, the same on all machines, another one for each job [titan_mxfp8]
#     LOCAL_ADDR     address of this machine, where host names do not resolve, as then in RDZV_ENDPOINT [its host name]
#     MAX_RESTARTS   how often all processes are started again after one has died [3]
#     RUNS           as in scripts/train.sh [mxfp8]
#     OUT            folder of the runs, on storage that all machines share [outputs/<config>-<RDZV_ID>]
#     LOG_RANK       processes of this machine whose output is shown, with commas; OUT/<run>/logs has that of all [0]
#     CONFIG, DRYRUN, PYTHON, TITAN, WANDB_*, as in scripts/train.sh
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # after "sh script"
. "$(dirname "$(readlink -f "$0")")/launch.sh"

config=$(find_config "${CONFIG:-$default_config}")
takes RDZV_ENDPOINT '[^[:space:]]+:[0-9]{1,5}' "HOST:PORT"
NNODES=${NNODES:-1} MAX_RESTARTS=${MAX_RESTARTS:-3} NGPU=${NGPU:-8} RUNS=${RUNS:-mxfp8}
if [ "$NNODES" -gt 1 ] && [ -z "${RDZV_ENDPOINT:-}" ]; then
    fail 2 "with NNODES=$NNODES set RDZV_ENDPOINT=HOST:PORT, the same on all machines"
fi
RDZV_ENDPOINT=${RDZV_ENDPOINT:-localhost:29500}
id=${RDZV_ID:-titan_mxfp8}
out=$(from_here "${OUT:-outputs/$(basename "$config" .toml)-$id}")

# torchrun's agents would offer restarted processes the store of the first start, where the addresses of the dead ones
# are: Gloo then fails with "Connection refused", and so may NCCL (pytorch#135712). So rank 0 makes a store at each start.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

torchrun_flags() {
    torchrun=(--nnodes="$NNODES" --rdzv-backend=c10d --rdzv-endpoint="$RDZV_ENDPOINT" --rdzv-id="$id-$1")
    torchrun+=(--max-restarts="$MAX_RESTARTS")
    if [ -n "${LOCAL_ADDR:-}" ]; then
        # torchrun would compare the endpoint with what the host name resolves to
        torchrun+=(--local-addr="$LOCAL_ADDR" --rdzv-conf="is_host=$([ "$LOCAL_ADDR" = "${RDZV_ENDPOINT%:*}" ] && echo 1 || echo 0)")
    fi
}
train_runs "$config" "$out" "$@"
