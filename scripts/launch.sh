# shellcheck shell=bash
# Shared by the launchers: goes to the repository's root and leaves the folder in which they were called in `here`. --help
# prints the comment at the top of the launcher.
set -euo pipefail
here=${here:-$PWD}
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# from_here PATH: a path of the caller's folder as it is called in the repository's root.
from_here() {
    case $1 in
        /*) echo "$1" ;;
        *) if [ "$here" = "$PWD" ]; then echo "$1"; else echo "$here/$1"; fi ;;
    esac
}

case ${1:-} in --help | -h) awk 'NR > 1 { if (!/^#( |$)/) exit; sub(/^# ?/, ""); print }' "$(from_here "$0")" && exit ;; esac

# fail STATUS MESSAGE: ends the launcher, in its name.
fail() {
    echo "$(basename "$0"): $2" >&2
    exit "$1"
}

# takes NAME PATTERN WORDS: ends with status 2 unless the variable NAME is empty, for its default, or its whole value
# matches the extended regular expression.
takes() {
    [[ ${!1:-} =~ ^($2)?$ ]] || fail 2 "$1 takes $3, not '${!1}'"
}
count='[1-9][0-9]{0,5}' # of processes and the like
# shellcheck disable=SC2034 # for the caller
minutes='[0-9]{1,6}([.][0-9]+)?'

# seconds MINUTES: so many, as a whole number.
seconds() { awk "BEGIN { print int(60 * $1) }"; }

# limited SECONDS LOG COMMAND...: runs it for so long, in a process group of its own and with its output in LOG too, and
# sets `result` to how it ended. Ctrl-C is passed on to it, and ends the launcher as soon as it has ended. What is cut
# off ends in the same way.
# shellcheck disable=SC2034 # for the caller
limited() {
    local limit=$1 log=$2 status=0 begin=$SECONDS
    shift 2
    if [ "$limit" -le 0 ]; then
        result="left out: MINUTES were over"
        return
    fi
    trap 'kill -INT "$(jobs -p %%)"; wait || true; fail 130 "interrupted; the same command with OUT=$out goes on"' INT
    set -m # else what runs in the background would ignore Ctrl-C
    # -i: tee sees the end of what is interrupted
    timeout --signal=INT --kill-after=40 "$limit" "$@" 2>&1 | tee -i "$log" &
    set +m
    wait "$!" || status=$?
    trap - INT
    [ "$status" != 137 ] || [ $((SECONDS - begin)) -lt "$limit" ] || status=124 # else memory may have been over
    case $status in
        0) result=passed ;;
        124) result="cut off: MINUTES were over" ;;
        *) result="FAILED with status $status" ;;
    esac
}

takes DRYRUN '[01]' "0 or 1"
takes TITAN '0\.[23]' "0.2 or 0.3"
takes NGPU "$count" "a number of processes"
takes NNODES "$count" "a number of machines"
takes MAX_RESTARTS '[0-9]{1,6}' "a number of restarts, or 0"
takes RUNS '(bf16|mxfp8)( (bf16|mxfp8))*' "bf16, mxfp8 or both with a space between them"
takes LOG_RANK '[0-9]{1,6}(,[0-9]{1,6})*' "numbers of processes with commas between them"
DRYRUN=${DRYRUN:-0} TITAN=${TITAN:-0.2} LOG_RANK=${LOG_RANK:-0}
# TITAN=0.3 trains with TorchTitan 0.3, whose configs are functions.
# shellcheck disable=SC2034 # for the caller
case $TITAN in
    0.3) default_config=debug_deepseek_v3 ;;
    *) default_config=train_configs/debug_llama4.toml ;;
esac

# find_config FILE: its path, of the caller's folder or else of the repository; ends with status 2 where it is in neither.
find_config() {
    if [ "$TITAN" = 0.3 ]; then
        echo "$1"
    elif [ -f "$(from_here "$1")" ]; then
        from_here "$1"
    elif [ -f "$1" ]; then
        echo "$1"
    else
        fail 2 "CONFIG=$1 is no file; ls $PWD/train_configs"
    fi
}

# folder_of CONFIG: where it is trained, so that its relative paths and those of flags lead from there: the repository for
# its own configs, the caller's folder for others.
folder_of() {
    if [ "$TITAN" = 0.3 ] || [[ $(cd "$(dirname "$1")" && pwd -P)/ = "$(pwd -P)"/* ]]; then
        echo "$PWD"
    else
        echo "$here"
    fi
}

# check_gpu: ends with status 1 where this machine has a GPU that torch cannot use: TorchTitan would train on the CPU.
# CUDA_VISIBLE_DEVICES= (nothing behind the sign) says that this is meant.
check_gpu() {
    case ${CUDA_VISIBLE_DEVICES-unset} in '' | -1 | NoDevFiles) return ;; esac
    nvidia-smi -L > /dev/null 2>&1 || [[ $(rocminfo 2> /dev/null) = *gfx* ]] || return 0
    python - << 'PYTHON' || exit 1
import sys, torch
if not torch.cuda.is_available():
    built = torch.version.cuda or torch.version.hip
    why = f"was built for {built}, which its driver may be too old for" if built else "is a CPU build"
    sys.exit(f"setup: this machine has a GPU, and torch {torch.__version__} of {sys.executable} cannot use it: it {why}. "
             "Install another torch, or set CUDA_VISIBLE_DEVICES= (nothing behind it) to use the CPU")
PYTHON
}

# stop SIGNAL: hands it on to torchrun, which ends its processes, and then ends the launcher. A training that outlived its
# launcher would go on unseen, and the same command would write into its folder beside it.
stop() {
    kill -s "$1" -- "-$(jobs -p %%)" && wait || true
    fail $((128 + $(kill -l "$1"))) "interrupted; logs are in $logs. With checkpoint.enable the same command with OUT=$out goes on"
}

# train_runs CONFIG OUT FLAG...: trains or, with DRYRUN=1, prints each of RUNS in NGPU processes, until one fails. The
# caller defines torchrun_flags RUN, which sets the array `torchrun` to the flags that place the processes.
train_runs() {
    local config=$1 out=$2 folder run name command torchrun logs status signal number=0
    folder=$(folder_of "$config")
    shift 2
    if [ "$DRYRUN" != 1 ]; then
        # shellcheck source=scripts/setup.sh
        . scripts/setup.sh
        check_gpu
        if ! mkdir -p "$out" || ! [ -w "$out" ]; then fail 2 "OUT=$out cannot be written to: name another folder"; fi
    fi
    # Two processes with as many threads as cores each would fight for them.
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(( ($(getconf _NPROCESSORS_ONLN) + NGPU - 1) / NGPU ))}
    export WANDB_PROJECT=${WANDB_PROJECT:-titan_mxfp8} # TorchTitan's default is "torchtitan"
    # As TorchTitan's launcher has it: when rows grow, memory of former sizes is of use for the new ones.
    [ -n "${PYTORCH_CUDA_ALLOC_CONF:-}" ] || export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}
    export NCCL_GRAPH_REGISTER=${NCCL_GRAPH_REGISTER:-0} # NCCL is not made for CUDA graphs with such memory
    for signal in INT TERM HUP; do
        # shellcheck disable=SC2064 # this signal
        trap "stop $signal" "$signal"
    done
    for run in $RUNS; do
        number=$((number + 1))
        torchrun_flags "$run"
        logs=$out/$run/logs/${LAUNCH:-$(date +%Y%m%d-%H%M%S)}
        command=(torchrun "${torchrun[@]}" --nproc-per-node="$NGPU" --log-dir="$logs" --tee=3 --role=rank)
        command+=(--local-ranks-filter="$LOG_RANK" -m torchtitan.train)
        if [ "$TITAN" = 0.3 ]; then
            # shellcheck disable=SC2206 # several words; the next flag ends them
            [ "$run" = bf16 ] || command+=(--override.imports ${OVERRIDES:-titan_mxfp8.titan03.experts titan_mxfp8.titan03.linears})
            command+=(--module="${MODULE:-titan_mxfp8.titan03}" --config="$config" --dump_folder="$out/$run")
        else
            command+=(--job.config_file="$config" --job.dump_folder="$out/$run")
            [ "$run" = mxfp8 ] || command+=(--model.converters=)
        fi
        name=${WANDB_RUN_NAME:-$(basename "$out")-$run}
        echo "+ WANDB_RUN_NAME=$name ${command[*]}${*:+ $*}"
        [ "$DRYRUN" != 1 ] || continue
        # INFO: torchrun says then that it restarts processes. PYTHONUNBUFFERED: and passes their output on at once
        status=0
        # In the background, as bash runs no trap while it waits for the foreground, and with set -m in a process group
        # of its own, which `stop` signals. exec: it waits for these programs, and not for shells around them.
        set -m
        (
            cd "$folder"
            export LOGLEVEL=${LOGLEVEL:-INFO} PYTHONUNBUFFERED=1 WANDB_RUN_NAME=$name
            exec "$program" -m torch.distributed.run "${command[@]:1}" "$@"
        ) 2>&1 | exec "$program" scripts/watch.py show "$logs" "$run, run $number of $(wc -w <<< "$RUNS")" &
        set +m
        wait "$!" || status=$?
        [ "$status" = 0 ] || fail "$status" "$run failed: $(python scripts/watch.py cause "$logs")"
    done
    trap - INT TERM HUP
}
