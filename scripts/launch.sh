# shellcheck shell=bash
# Shared by the scripts that train, verify_hardware.sh and bench_all.sh, which source it from the repository's root, with
# the folder in which they were called in `here`.
here=${here:-$PWD}

# from_here PATH: a path of the caller's folder as it is called in the repository's root.
from_here() {
    case $1 in
        /*) echo "$1" ;;
        *) if [ "$here" = "$PWD" ]; then echo "$1"; else echo "$here/$1"; fi ;;
    esac
}

# TITAN=0.3 trains with TorchTitan 0.3, whose configs are functions.
# shellcheck disable=SC2034 # for the caller
case ${TITAN:-0.2} in
    0.3) default_config=debug_deepseek_v3 ;;
    *) default_config=train_configs/debug_llama4.toml ;;
esac

# find_config FILE: its path, of the caller's folder or else of the repository; ends with status 2 where it is in neither.
find_config() {
    if [ "${TITAN:-0.2}" = 0.3 ]; then
        echo "$1"
    elif [ -f "$(from_here "$1")" ]; then
        from_here "$1"
    elif [ -f "$1" ]; then
        echo "$1"
    else
        echo "$(basename "$0"): CONFIG=$1 is no file; ls $PWD/train_configs" >&2
        exit 2
    fi
}

# train_runs NGPU "RUNS" CONFIG OUT FLAG...: trains or, with DRYRUN=1, prints each of RUNS, until one fails. The caller
# defines torchrun_flags RUN, which sets the array `torchrun` to the flags that place the processes.
train_runs() {
    local ngpu=$1 runs=$2 config=$3 out=$4 run name command torchrun logs status
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
        logs=$out/$run/logs/${LAUNCH:-$(date +%Y%m%d-%H%M%S)}
        command=(torchrun "${torchrun[@]}" --nproc-per-node="$ngpu" --log-dir="$logs" --tee=3 --role=rank)
        command+=(--local-ranks-filter="${LOG_RANK:-0}" -m torchtitan.train)
        case $run in
            bf16 | mxfp8) ;;
            *) echo "$(basename "$0"): RUNS takes bf16 and mxfp8, not '$run'" >&2; exit 2 ;;
        esac
        if [ "${TITAN:-0.2}" = 0.3 ]; then
            # shellcheck disable=SC2206 # several words; the next flag ends them
            [ "$run" = bf16 ] || command+=(--override.imports ${OVERRIDES:-titan_mxfp8.titan03.experts titan_mxfp8.titan03.linears})
            command+=(--module="${MODULE:-titan_mxfp8.titan03}" --config="$config" --dump_folder="$out/$run")
        else
            command+=(--job.config_file="$config" --job.dump_folder="$out/$run")
            [ "$run" = mxfp8 ] || command+=(--model.converters=)
        fi
        name=${WANDB_RUN_NAME:-$(basename "$out")-$run}
        echo "+ WANDB_RUN_NAME=$name ${command[*]}${*:+ $*}"
        [ "${DRYRUN:-0}" != 1 ] || continue
        # INFO: torchrun says then that it restarts processes. PYTHONUNBUFFERED: and passes their output on at once
        status=0
        LOGLEVEL=${LOGLEVEL:-INFO} PYTHONUNBUFFERED=1 WANDB_RUN_NAME=$name "${command[@]}" "$@" 2>&1 |
            python scripts/watch.py show "$logs" || status=${PIPESTATUS[0]}
        if [ "$status" != 0 ]; then
            echo "$(basename "$0"): $run failed: $(python scripts/watch.py cause "$logs")" >&2
            exit "$status"
        fi
    done
}
