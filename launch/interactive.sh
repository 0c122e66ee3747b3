#!/usr/bin/env bash
# Runs ranks in the current Slurm allocation (salloc), in the foreground; Ctrl-C saves and ends them.
#
#     salloc -N 2 --ntasks-per-node=8 --gpus-per-node=8 --exclusive
#     launch/interactive.sh [-n RANKS] [-t THREADS] [--cmd COMMAND] CONFIG [key=value ...]
#     launch/interactive.sh -n 2 configs/quickstart.yaml train.num_steps=5
#     launch/interactive.sh --cmd generate -- --model DIR --prompts in.jsonl --out out.jsonl
#
# Without -n as many ranks as the allocation has tasks. The exit code is the ranks'. Nothing is requeued; the ranks' output
# is printed with their numbers, not written to logs/. Variables of the environment, also for -t: slurm/common.sh.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)" script_name=interactive.sh
source "$root/slurm/common.sh"

ranks="" threads=""
read_options "$@"
set -- "${rest[@]}"
[ -n "${SLURM_JOB_ID:-}" ] || die "no Slurm allocation: salloc first, or submit slurm/train.sbatch"
in_a_job

OMP_NUM_THREADS="${threads:-${OMP_NUM_THREADS:-}}"
set_environment
set_network
case "$1" in -*) ;; *) find_config "$1" && set -- "$config" "${@:2}" ;; esac
# For the ranks' exit code, because srun returns 137 when it killed the others. All nodes must see it: not in /tmp.
where="${LOGS:-${SLURM_SUBMIT_DIR:-$PWD}}"
if notes="$(mktemp -d "$where/.megatron-tlt-exit-XXXXXX")"; then
    trap 'rm -rf "$notes"' EXIT
    attempt="$(cd "$notes" && pwd)" # which a container gets
    export MEGATRON_TLT_ATTEMPT="$attempt"
else
    say "cannot write to $where: the exit code will be srun's, 137 where the ranks' is 1 or 2"
fi
set_srun_words
# USR1, which srun passes on: its own answer to SIGTERM and SIGHUP is SIGKILL for the ranks.
run_apart USR1 srun "${srun_words[@]}" ${ranks:+--ntasks="$ranks"} --label \
    "$python" -m mpi4py -m megatron_tlt "$subcommand" "$@"
exit "$(exit_code "$rc" "$(read_number "${notes:-/nonexistent}/exit" "")")"
