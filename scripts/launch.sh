# shellcheck shell=bash
# Shared by train.sh and train_multinode.sh, which source it from the repository's root.

# need_config FILE: stops unless FILE exists.
need_config() {
    [ -f "$1" ] || { echo "$(basename "$0"): CONFIG=$1 is no file; ls train_configs" >&2; exit 2; }
}

# train_runs NGPU "RUNS" CONFIG OUT FLAG...: trains or, with DRYRUN=1, prints each of RUNS. The caller defines
# torchrun_flags RUN, which sets the array `torchrun` to the flags that place the processes.
train_runs() {
    local ngpu=$1 runs=$2 config=$3 out=$4 run name command torchrun
    shift 4
    if [ "${DRYRUN:-0}" != 1 ]; then
        # shellcheck source=scripts/setup.sh
        . scripts/setup.sh
    fi
    # Two processes with as many threads as cores each would fight for them.
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(( ($(getconf _NPROCESSORS_ONLN) + ngpu - 1) / ngpu ))}
    export WANDB_PROJECT=${WANDB_PROJECT:-titan_mxfp8} # TorchTitan's default is "torchtitan"
    for run in $runs; do
        torchrun_flags "$run"
        command=(torchrun "${torchrun[@]}" --nproc-per-node="$ngpu" --local-ranks-filter=0 -m torchtitan.train)
        command+=(--job.config_file="$config" --job.dump_folder="$out/$run")
        case $run in
            bf16) command+=(--model.converters=) ;;
            mxfp8) ;;
            *) echo "$(basename "$0"): RUNS takes bf16 and mxfp8, not '$run'" >&2; exit 2 ;;
        esac
        name=${WANDB_RUN_NAME:-$(basename "$out")-$run}
        echo "+ WANDB_RUN_NAME=$name ${command[*]}${*:+ $*}"
        [ "${DRYRUN:-0}" = 1 ] || WANDB_RUN_NAME=$name "${command[@]}" "$@"
    done
}
