# shellcheck shell=bash
# Makes .venv in the repository's root and installs the package with what training and the tests need. Sourced by
# train.sh and test.sh, from the root; leaves the environment active. Installs again only when pyproject.toml changes.
# With TITAN=0.3 it makes .venv03 beside it, for TorchTitan 0.3.
#
# torch: one that the system's Python already has is used. Else, with an NVIDIA or AMD GPU, the newest tested release
# that pip finds; without one, a CPU build, so that no CUDA packages are downloaded. TORCH= names another requirement. Where
# there is a GPU, a CPU build that an earlier set-up without one installed is replaced.
#
# PYTHON= names a Python to be used as it is, with what it has and what lies on PYTHONPATH: nothing is installed, which a
# machine without a package registry needs, and nothing is written into the repository, which may be read-only.
#
# Afterwards scripts call python and torchrun. Where a function of the shell cannot be called, as by exec and timeout,
# "$program" is this python.
#
# EXTRA=hf installs one more extra of pyproject.toml, which test.sh wants. It has a stamp of its own, so that no script
# that does without installs again.

program=python
if [ -n "${PYTHON:-}" ]; then
    program=$PYTHON
    case $program in
        /*) ;;
        */*) program=${here:-$PWD}/$program ;; # of the caller's folder, as other paths are
    esac
    if ! program=$(type -P "$program"); then
        echo "setup: PYTHON=$PYTHON is no program" >&2
        exit 1
    fi
    python() { "$program" "$@"; }
    torchrun() { "$program" -m torch.distributed.run "$@"; }
    export PYTHON=$program PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
fi

case ${TITAN:-0.2} in
    0.3) # torch 2.11 lacks torch.distributed.fsdp.DataParallelMeshDims, which TorchTitan 0.3 imports
        venv=.venv03 extras=train03,test torches="torch>=2.13,<2.14"
        fits="import torch; assert torch.__version__ >= (2, 13)" ;;
    *) venv=.venv extras=train,test torches="torch>=2.11,<2.14" fits="import torch" ;;
esac

build=cpu
if command -v nvidia-smi > /dev/null 2>&1; then
    build=gpu fits+="; assert torch.version.cuda or torch.version.hip"
elif command -v rocminfo > /dev/null 2>&1; then # pip finds a build for CUDA, unless it is told of an index of ROCm's
    build=rocm fits+="; assert torch.version.hip"
fi
stamp=$venv/.installed-$(cksum < pyproject.toml | cut -d' ' -f1)-${TORCH:-default}-$build

# install WHAT FLAG...: with pip's bar on a terminal. --no-compile: Python compiles what it imports, pip all of torch,
# which took 40% of the time. What pip has downloaded stays in its cache, so Ctrl-C loses little.
install() {
    local quiet=-q
    [ ! -t 2 ] || quiet=--progress-bar=on
    echo "setup: $1, into $venv" >&2
    trap 'echo "setup: interrupted; the same command goes on" >&2; exit 130' INT
    shift
    "$venv/bin/python" -m pip install "$quiet" --no-compile --disable-pip-version-check "$@"
    trap - INT
}

if [ -z "${PYTHON:-}" ] && [ ! -e "$stamp" ]; then
    if ! [ -w "$venv" ] && ! [ -w . ]; then
        echo "setup: $PWD cannot be written to, so that nothing can be installed in $venv: set PYTHON= to a Python that has" >&2
        echo "setup: torch, torchtitan and the rest" >&2
        exit 1
    fi
    site=()
    ! python3 -c "$fits" 2> /dev/null || site=(--system-site-packages)
    python3 -m venv "${site[@]}" "$venv"
    # The pip that comes with Python may be years old: 3.11's takes twice as long for what follows.
    "$venv/bin/python" -m pip install -q --disable-pip-version-check --upgrade pip || true
    if ! "$venv/bin/python" -c "$fits" 2> /dev/null; then # the python3 above may be that of another environment
        torch=${TORCH:-$torches} # elsewhere than on Linux x86-64 this is a CPU build
        [ "${TORCH:-}$build-$(uname -s)-$(uname -m)" != cpu-Linux-x86_64 ] || torch=torch==2.13.0+cpu
        # force-reinstall: pip takes a CPU build for what is asked for. What torch needs comes with the rest.
        if ! install "1 of 2, $torch" --force-reinstall --no-deps "$torch"; then
            echo "setup: pip found no '$torch'. Where your package index has no CPU build of torch, take the index address" >&2
            echo "setup: from pytorch.org (Get Started: Linux, Pip, CPU), put it in PIP_EXTRA_INDEX_URL and run this again." >&2
            exit 1
        fi
        if [ $build = rocm ] && ! "$venv/bin/python" -c "$fits" 2> /dev/null; then
            echo "setup: the torch that pip found is not one for AMD's GPUs. Take the index address from pytorch.org (Get" >&2
            echo "setup: Started: Linux, Pip, ROCm), put it in PIP_EXTRA_INDEX_URL and run this again." >&2
            exit 1
        fi
    fi
    install "2 of 2, TorchTitan and what it and the tests need" -e ".[$extras${EXTRA:+,$EXTRA}]"
    touch "$stamp" ${EXTRA:+"$stamp-$EXTRA"}
fi
if [ -z "${PYTHON:-}" ]; then
    if [ -n "${EXTRA:-}" ] && [ ! -e "$stamp-$EXTRA" ]; then
        install "the extra $EXTRA" -e ".[$EXTRA]"
        touch "$stamp-$EXTRA"
    fi
    # shellcheck source=/dev/null
    . "$venv/bin/activate"
fi

if [ $build = cpu ]; then
    # glibc gives large buffers back to the kernel as they are freed, and torch has no cache above it on CPU: mapping and
    # zeroing them anew takes a third of the reference backend's time (an expert layer: 69 ms against 44).
    export MALLOC_MMAP_THRESHOLD_=$((1 << 30)) MALLOC_TRIM_THRESHOLD_=$((1 << 30))
fi
