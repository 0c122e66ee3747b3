#!/usr/bin/env bash
# Starts ranks of megatron-tlt on this machine, with THREADS CPU threads each (default 1).
#
#     launch/local.sh -n RANKS [-t THREADS] [--cmd COMMAND] CONFIG [key=value ...]
#     launch/local.sh -n 2 configs/quickstart.yaml train.num_steps=5
#     launch/local.sh -n 2 --cmd sft sft.yaml
#     launch/local.sh -n 2 --cmd generate -- --model DIR --prompts in.jsonl --out out.jsonl
#
# The exit code is the job's. PYTHON and MPIEXEC replace the ones in .venv.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)" script_name=local.sh
source "$root/slurm/common.sh"

ranks=1 threads=1
read_options "$@"

python="${PYTHON:-$root/.venv/bin/python}"
mpiexec="${MPIEXEC:-$root/.venv/bin/mpiexec}"
for program in "$python" "$mpiexec"; do
    command -v "$program" >/dev/null || die "$program is not there: run 'make setup' first"
done

# Without a limit every rank's thread pool would take all cores.
export OMP_NUM_THREADS="$threads" MKL_NUM_THREADS="$threads" OPENBLAS_NUM_THREADS="$threads"
set_rank_environment
# All ranks are on this machine, so nothing must be reachable from outside.
export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}" UCX_NET_DEVICES="${UCX_NET_DEVICES:-lo}"
# Also within an allocation of Slurm, where mpiexec would start them through srun.
export HYDRA_LAUNCHER=fork HYDRA_RMK=user HYDRA_IFACE=lo
# A rank that waits in MPI yields its core: with more ranks than cores, spinning ones slow the working ones 4x.
export MPIR_CVAR_ENABLE_HEAVY_YIELD="${MPIR_CVAR_ENABLE_HEAVY_YIELD:-1}"
export MPIR_CVAR_POLLS_BEFORE_YIELD="${MPIR_CVAR_POLLS_BEFORE_YIELD:-10}"
# Ranks write into mpiexec's pipe and cannot see the terminal behind it.
if [ -t 1 ] && [ "${TERM:-dumb}" != dumb ]; then
    export MEGATRON_TLT_TERMINAL_COLUMNS="${COLUMNS:-$(tput cols 2>/dev/null || echo 100)}"
fi

# `-m mpi4py` ends all ranks when one of them raises.
run_apart TERM "$mpiexec" -n "$ranks" "$python" -m mpi4py -m megatron_tlt "$subcommand" "${rest[@]}"
exit "$rc"
