#!/usr/bin/env bash
# Trains a model: [VARIABLE=value ...] ./run_train.sh [--section.key=value ...], from any folder.
#
#   CONFIG_FILE   TOML file                              ./train_configs/deepseek_v3_debug.toml
#   NGPU          ranks on this host                     accelerators visible, or 2 on a CPU
#   LOG_RANK      ranks whose output is shown            0
#   NNODES NODE_RANK MASTER_ADDR MASTER_PORT             several hosts (c10d rendezvous)
#   MAX_RESTARTS  restarts after a crash                 0
#   COMM_MODE     fake_backend: one process plays rank 0 of NGPU, for one step by default
#   VENV          virtual environment to use or make     .venv, unless the active python will do
#
# A relative CONFIG_FILE is looked up in the current folder, then in this script's.
#
# Exit status: 0 trained, 2 the configuration is refused, else a crash. --help lists all flags.
set -euo pipefail

# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/scripts/environment.sh"

refuse() {
    echo "error: $1" >&2
    exit 2
}

# nvidia-smi does not know CUDA_VISIBLE_DEVICES. Asking torch would take seconds.
count_accelerators() {
    if [[ -n "${CUDA_VISIBLE_DEVICES+set}" ]]; then
        # As CUDA reads it, the list ends at the first entry that is no device, such as -1.
        tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | sed '/^-/,$d' | grep -c . || true
    else
        nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true
    fi
}

# One process in place of torchrun's NGPU, with the variables torchrun would set for rank 0.
run_fake_backend() {
    export RANK=0 LOCAL_RANK=0 WORLD_SIZE="$NGPU" LOCAL_WORLD_SIZE="$NGPU"
    exec "$PYTHON" -m torchtitan_ext.train "$@"
}

run_ranks() {
    local rendezvous=(--rdzv_backend c10d --rdzv_endpoint localhost:0)
    if ((NNODES > 1)); then
        rendezvous=(--nnodes "$NNODES" --rdzv_backend c10d)
        rendezvous+=(--rdzv_endpoint "$MASTER_ADDR:${MASTER_PORT:-29500}")
        # Host 0 keeps the store; unset, the hosts find out by MASTER_ADDR.
        [[ -z "${NODE_RANK:-}" ]] || rendezvous+=(--rdzv_conf "is_host=$((NODE_RANK == 0))")
    fi
    # torchrun keeps the ranks' output in files until the end, for the summary of a crash.
    log_dir="$(mktemp -d)"
    trap 'rm -rf "$log_dir"' EXIT
    trap 'end_ranks INT' INT
    trap 'end_ranks TERM' TERM
    trap 'end_ranks HUP' HUP
    # In a process group of its own, torchrun gets Ctrl-C through this script alone: a second signal
    # would break off its way of ending the ranks.
    set -m
    "$PYTHON" -m torch.distributed.run --nproc_per_node "$NGPU" "${rendezvous[@]}" \
        --max-restarts "$MAX_RESTARTS" --log-dir "$log_dir" \
        --local-ranks-filter "$LOG_RANK" --role rank --tee 3 \
        -m torchtitan_ext.train "$@" </dev/null &
    torchrun=$!
    set +m
    wait_for_torchrun
}

torchrun="" signal=""

# Passes the first signal on to torchrun, which ends the ranks, by force if they take too long.
end_ranks() {
    [[ -z "$signal" ]] || return 0
    signal=$1
    echo "run_train.sh: got SIG$signal, ending the ranks" >&2
    [[ -z "$torchrun" ]] || kill -TERM "$torchrun" 2>/dev/null || true
}

wait_for_torchrun() {
    local status=0
    # One that came before there was a process to pass it on to.
    [[ -z "$signal" ]] || kill -TERM "$torchrun" 2>/dev/null || true
    wait "$torchrun" || status=$?
    # A signal ends the wait before torchrun has ended.
    while kill -0 "$torchrun" 2>/dev/null; do
        status=0
        wait "$torchrun" || status=$?
    done
    if [[ -n "$signal" ]] && ((status != 0)); then
        echo "run_train.sh: ended by SIG$signal" >&2
        status=$((128 + $(kill -l "$signal")))
    fi
    exit "$status"
}

accelerators="$(count_accelerators)"
default_ranks=$((accelerators > 0 ? accelerators : 2))
export NGPU="${NGPU:-$default_ranks}" NNODES="${NNODES:-1}" LOG_RANK="${LOG_RANK:-0}"
export MAX_RESTARTS="${MAX_RESTARTS:-0}"
CONFIG_FILE="${CONFIG_FILE:-./train_configs/deepseek_v3_debug.toml}"
COMM_MODE="${COMM_MODE:-}"

flags=(--job.config_file="$CONFIG_FILE")
if [[ "$COMM_MODE" == fake_backend ]]; then
    flags+=(--comm.mode=fake_backend --training.steps=1)
    [[ "$NNODES" == 1 ]] || refuse "NNODES = \"$NNODES\": must be 1 with COMM_MODE=fake_backend"
elif [[ -n "$COMM_MODE" ]]; then
    refuse "COMM_MODE = \"$COMM_MODE\": must be fake_backend, or not set"
fi
[[ "$NNODES" == 1 || -n "${MASTER_ADDR:-}" ]] || refuse "MASTER_ADDR: must be set when NNODES > 1"
flags+=("$@")

find_python "$ROOT/requirements.txt"
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"

# Once, before there are NGPU processes to say the same.
"$PYTHON" -m torchtitan_ext.check_config "${flags[@]}"
[[ " $* " != *" --help "* && " $* " != *" -h "* ]] || exit 0

processes="$NGPU"
if [[ "$COMM_MODE" == fake_backend ]]; then
    processes=1
fi
if ((accelerators == 0)) && [[ -z "${OMP_NUM_THREADS:-}" ]]; then
    threads=$(($(nproc) / processes))
    export OMP_NUM_THREADS=$((threads > 0 ? threads : 1))
fi
if [[ "$COMM_MODE" == fake_backend ]]; then
    run_fake_backend "${flags[@]}"
fi
run_ranks "${flags[@]}"
