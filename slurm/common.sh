# Shared by the .sbatch files and launch/; sourced, never run by itself. Usage: docs/guides/slurm.md.
#
# From the environment (sbatch passes it on):
#   PYTHON      interpreter of the ranks (default: .venv of this repository; in a container: python3)
#   MPI         srun's plugin: pmi2 (default) for the mpich wheel, pmix for most sites' own MPI; a wrong pair is refused
#   CONTAINER   image for pyxis, built from ./Dockerfile; MOUNTS: more mounts, SRC:DST[,SRC:DST...]
#   HF_HOME, TRITON_CACHE_DIR, VLLM_CACHE_ROOT   caches, mounted in a container, too (default: those below the home)
#   IFACE       network interface between nodes (default: the one of the default route; lo on a single node)
#   LOGS        directory of the logs, LOGS/JOB/ATTEMPT (default: logs in the directory of submission)
#   OMP_NUM_THREADS   CPU threads of a rank (default: those of sbatch -c, without it 1)
#   MAX_STALLS  attempts in a row without a new checkpoint step after which it gives up (default 2)
#   SRUN_ARGS   more arguments for srun
# shellcheck shell=bash
set -euo pipefail
export SLURM_TIME_FORMAT=standard # `date` reads what scontrol prints
export SLURM_EXPORT_ENV=ALL       # sbatch --export=NONE is for this script: the ranks get all that it sets

# A log that cannot be written (a full file system) must not end the script: it would neither signal nor requeue.
say() { echo "[$(date +%FT%T)] $*" || true; }
die() { echo "${script_name:-slurm}: $1" >&2; exit "${2:-2}"; }

# The options of launch/: sets what is given of `ranks` and `threads`, `subcommand`, and in `rest` the arguments.
read_options() {
    subcommand=train
    while [ $# -gt 0 ]; do
        case "$1" in
        -n | --ranks | -t | --threads)
            [[ "${2:-}" =~ ^[1-9][0-9]*$ ]] || die "$1 takes a number above 0, not '${2:-}'"
            case "$1" in -n | --ranks) ranks="$2" ;; *) threads="$2" ;; esac
            shift 2
            ;;
        --cmd) [ -n "${2:-}" ] || die "--cmd takes a subcommand of megatron-tlt" && subcommand="$2" && shift 2 ;;
        -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" && exit 0 ;; # its head
        --) shift && break ;;
        -*) die "unknown option $1 (options come before the configuration; see --help)" ;;
        *) break ;;
        esac
    done
    [ $# -gt 0 ] || die "no configuration given (see --help)"
    rest=("$@")
}

# What scontrol takes this job for: of an array, this task. One of its tasks has the array's own number as SLURM_JOB_ID,
# which scontrol takes for all of them.
slurm_job() {
    if [ -n "${SLURM_ARRAY_JOB_ID:-}" ]; then echo "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"; else echo "$SLURM_JOB_ID"; fi
}

# One word a line of /proc/net/route: interface, then destination; all zeros is the default route.
default_interface() { awk '$2 == "00000000" { print $1; exit }' /proc/net/route; }

set_rank_environment() {
    export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" TOKENIZERS_PARALLELISM=false
    # Ranks, and later starts, hash texts alike: some procedural tasks draw their items from a set.
    export PYTHONHASHSEED="${PYTHONHASHSEED:-0}"
    # glibc asks for pages of 2 MiB for its heap, which many kernels map on request only: a pass over the weights of a CPU
    # rank then needs 512 times fewer translations of addresses. Beside pages of 64 KiB (ARM) a large one has 512 MiB.
    [ "$(getconf PAGESIZE)" != 4096 ] || export GLIBC_TUNABLES="${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}"
}

set_environment() {
    python="${PYTHON:-$root/.venv/bin/python}"
    [ -z "${CONTAINER:-}" ] || python="${PYTHON:-python3}"
    if [ -z "${CONTAINER:-}" ] && ! command -v "$python" >/dev/null; then
        die "$python is not there: run 'make setup' in $root, or set PYTHON or CONTAINER"
    fi
    set_rank_environment
    export PYTHONUNBUFFERED=1
    # A pool of all cores in each rank would fight for them; those of sbatch -c are the rank's own.
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}"
}

set_network() {
    local nodes="${SLURM_JOB_NUM_NODES:-1}"
    if [ "$nodes" -gt 1 ] && [ -z "${IFACE:-}" ]; then
        IFACE="$(default_interface)"
        [ -n "$IFACE" ] || die "no default route tells the network between nodes: set IFACE"
        say "network between nodes: $IFACE (default route of $(hostname); IFACE=NAME sets another)"
    fi
    IFACE="${IFACE:-lo}"
    # By default both use the host name's interface, or the first that is up: on login-like nodes the wrong one.
    export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$IFACE}" NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-$IFACE}"
    # NCCL finds InfiniBand by itself. Where a node has more adapters than belong to this network: NCCL_IB_HCA=mlx5_0,...
    # A version line and errors, once: without it errors read "unhandled system error" only.
    export NCCL_DEBUG="${NCCL_DEBUG:-WARN}"
    # MPI sends kilobytes from host memory: UCX need not track every CUDA allocation for it.
    export UCX_MEMTYPE_CACHE="${UCX_MEMTYPE_CACHE:-n}"
    # UCX's own handlers for crashes would hide the stacks that Python's faulthandler writes.
    export UCX_ERROR_SIGNALS="${UCX_ERROR_SIGNALS:-}"
}

# The smallest number of "96(x2),64", a list of nodes; nothing for none.
fewest() { tr , '\n' <<<"$1" | sed 's/(.*//' | sort -n | head -n 1; }

# Arguments for srun: MPI plugin, CPUs, container. GPUs are not bound: every rank of a node sees all GPUs of the job and
# uses its own by local rank, because NCCL's direct copies between two GPUs need both to be visible.
set_srun_words() {
    local tasks="${SLURM_NTASKS_PER_NODE:-}" cpus="${SLURM_CPUS_PER_TASK:-}" all mounts
    [ -n "$tasks" ] || tasks="${SLURM_TASKS_PER_NODE%%[!0-9]*}"
    all="$(fewest "${SLURM_JOB_CPUS_PER_NODE:-}")"
    all="${all:-${SLURM_CPUS_ON_NODE:-}}"
    if [ -z "$cpus" ] && [ -z "$all" ]; then cpus="<CPUs of the node / $tasks>"; fi # a dry run
    [ -n "$cpus" ] || cpus=$((all > tasks ? all / tasks : 1))
    srun_words=(--mpi="${MPI:-pmi2}" --kill-on-bad-exit=1 --cpus-per-task="$cpus" --cpu-bind=cores
        --distribution=block:block) # neighbours on one socket, beside the GPUs of their numbers
    if [ -n "${CONTAINER:-}" ]; then
        set_caches
        srun_words+=(--container-image="$CONTAINER" --container-workdir="$PWD" --no-container-mount-home)
        mounts="$root:$root,$PWD:$PWD${attempt:+,$attempt:$attempt}$caches${MOUNTS:+,$MOUNTS}"
        srun_words+=(--container-mounts="$mounts")
        # SRC:DST[:FLAGS],... -> DST:...; ranks refuse to write elsewhere: it would be lost with the container.
        MEGATRON_TLT_MOUNTS="$(tr , '\n' <<<"$mounts" | sed 's/^[^:]*:\([^:]*\).*/\1/' | paste -sd:)"
        export MEGATRON_TLT_MOUNTS
    fi
    # shellcheck disable=SC2206  # SRUN_ARGS is a list of words
    srun_words+=(${SRUN_ARGS:-})
}

# The home is not mounted in a container, so these are: models of the hub, and kernels that Triton and vLLM have compiled,
# where ranks outside a container have them. Sets `caches`, mounts behind others; makes what is not there, in a job.
set_caches() {
    local folder home="${XDG_CACHE_HOME:-$HOME/.cache}"
    export HF_HOME="${HF_HOME:-$home/huggingface}" VLLM_CACHE_ROOT="${VLLM_CACHE_ROOT:-$home/vllm}"
    export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-$HOME/.triton/cache}"
    caches=""
    for folder in "$HF_HOME" "$TRITON_CACHE_DIR" "$VLLM_CACHE_ROOT"; do
        [ -z "${SLURM_JOB_ID:-}" ] || mkdir -p "$folder"
        caches+=",$folder:$folder"
    done
}

# Sets `config`: $1, or the repository's where the working directory has none of this name.
find_config() {
    config="$1"
    if [ -e "$1" ]; then return; fi
    [ "$PWD" != "$root" ] || die "$1 is not in $PWD"
    [ -e "$root/$1" ] || die "$1 is neither in $PWD nor in $root"
    config="$root/$1"
    say "$1 is not in $PWD: using $config (other paths of the command line count from $PWD)"
}

open_logs() {
    local logs="${LOGS:-${SLURM_SUBMIT_DIR:-$PWD}/logs}"
    job_logs="$logs/$SLURM_JOB_ID" number="${SLURM_RESTART_COUNT:-0}"
    attempt="$job_logs/$number"
    mkdir -p "$attempt"
    attempt="$(cd "$attempt" && pwd)"
    ln -sfn "$number" "$job_logs/latest"
    ln -sfn "$SLURM_JOB_ID/$number" "$logs/latest"
    export MEGATRON_TLT_ATTEMPT="$attempt" # ranks note their exit code and checkpoints here
}

# MPICH names its shared memory after job and step, and a requeue keeps both: the files of a killed attempt then make
# MPI_Init fail (measured: "Message truncated"), and hold memory. Names are listed before open files, and only those
# older than some seconds: so a file that is being made is not removed.
sweep_nodes() {
    # shellcheck disable=SC2016  # for the shell on each node
    local sweep='cd /dev/shm && files="$(find . -maxdepth 1 -name "mpich_shm_*" -user "$(id -u)" ! -newermt "5 seconds ago")"
        used="$(cat /proc/[0-9]*/maps 2>/dev/null | grep -o "mpich_shm_[0-9a-f_]*" | sort -u)"
        for file in $files; do
            grep -qxF "${file#./}" <<<"$used" || { rm -f "$file" && echo "$(hostname): removed ${file#./}"; }
        done'
    srun --mpi=none --overlap --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --quiet \
        --output="$attempt/sweep.log" bash -c "$sweep" </dev/null || say "cannot sweep /dev/shm; going on"
}

# Waits for the end of a child; sets rc, to 1 and `lost` where its code is not known.
wait_for() {
    while :; do # `wait` returns at every trapped signal
        wait "$1" && rc=0 || rc=$?
        kill -0 "$1" 2>/dev/null || break
    done
    # Where a child ends at the same time as a signal comes, its code is lost: bash 5.2 then returns 127 or -1.
    lost=0
    if [ "$rc" -gt 128 ]; then
        local last=0
        wait "$1" 2>/dev/null || last=$?
        if [ "$last" = 127 ] || [ "$last" = -1 ]; then rc=1 lost=1; else rc="$last"; fi
    fi
}

# Passes the launcher's output on. mpiexec ends the job where it cannot write (the terminal is closed, the disk full); this
# reads on.
relay() { trap '' HUP INT QUIT TERM && exec tee --output-error=warn /dev/null 2>/dev/null; }

# run_apart SIGNAL COMMAND...: runs a launcher to its end; sets rc, and closes the output. The launcher is a process group
# of its own, so that signals of the terminal come to this script alone, which passes them on: SIGTERM, Ctrl-C, and SIGHUP
# when the terminal is closed, as SIGNAL; a second Ctrl-C as SIGHUP, which ends launcher and ranks.
run_apart() {
    local name step ends relays=()
    if [ /dev/fd/1 -ef /dev/fd/2 ]; then # one relay keeps the order of lines
        exec > >(relay) 2>&1 && relays=($!)
    else
        exec > >(relay) && relays=($!)
        exec 2> >(relay >&2) && relays+=($!)
    fi
    case "${subcommand:-train}" in
    train | sft | drafter) ends="a training saves its last finished step and ends; once more ends it at once, unsaved" ;;
    *) ends="and end; a repeated \`generate\` or \`eval\` goes on with the responses that were finished" ;;
    esac
    set -m
    "${@:2}" </dev/null &
    step=$!
    set +m
    # shellcheck disable=SC2064  # now: the names
    for name in QUIT USR1 USR2; do trap "kill -$name $step 2>/dev/null || true" "$name"; done
    # shellcheck disable=SC2064
    trap "kill -$1 $step 2>/dev/null || true" HUP TERM
    # shellcheck disable=SC2064
    trap "trap 'kill -HUP $step 2>/dev/null || true' INT; kill -$1 $step 2>/dev/null || true
        printf '\\nCtrl-C: the ranks get SIG$1, %s\\n' '$ends' >&2 || true" INT
    wait_for "$step"
    exec >&- 2>&-
    wait "${relays[@]}" || true # for the last lines
}

# Runs the ranks to their end; sets rc.
run_step() {
    local step
    sweep_nodes
    trap 'kill -USR1 "$step" 2>/dev/null || true; say "SIGUSR1: time is nearly up"' USR1
    # Slurm signals the ranks itself; a SIGTERM to srun would make it end them by force.
    trap 'say "SIGTERM: Slurm is ending this job"' TERM
    srun "${srun_words[@]}" --output="$attempt/rank-%5t.log" "$@" </dev/null &
    step=$!
    wait_for "$step"
    trap '' USR1 TERM
    local noted
    noted="$(read_number "$attempt/exit" "")"
    if [ "$rc" -eq 0 ] && [ -z "$noted" ] && [ "${ranks_note_exit:-0}" = 1 ]; then
        look_at_job
        if is_requeued || [ "$(job_fact JobState)" != RUNNING ]; then
            say "srun ended with 0, but the ranks have noted no exit code: treated as a failure"
            rc=1
        else
            say "the ranks could not write their exit code to $attempt: srun's 0 is used"
        fi
    fi
    rc="$(exit_code "$rc" "$noted")"
}

# Runs one attempt of the script's command (`set_command`) with CONFIG ...; ends the script, or requeues the job, which
# then resumes.
run_attempt() {
    local again=() # a run that began anew, or from a named checkpoint, resumes from its own checkpoints when requeued
    find_config "$1"
    open_logs
    set_srun_words
    say "job $SLURM_JOB_ID attempt $number: $SLURM_JOB_NUM_NODES nodes ($SLURM_JOB_NODELIST), $SLURM_NTASKS ranks, $attempt"
    look_at_job 1
    warn_of_short_time "$(job_fact TimeLimit)" "$(asked signal)" ", unless sbatch was given another"
    if [ "$number" -gt 0 ] && ls "$job_logs"/*/checkpoint >/dev/null 2>&1; then again=(checkpoint.resume=auto); fi
    set_command "$config" "${@:2}" ${again[@]+"${again[@]}"}
    run_step "${command[@]}"
    requeue_or_exit
}

read_number() { if [ -s "$1" ]; then cat "$1"; else echo "$2"; fi; }

# The ranks' exit code, where srun lost it: srun returns 137 when it killed the others after the first rank had exited,
# and 0 after a node has failed (measured). $2 is the code that the ranks noted, or empty; it also counts where bash has
# lost srun's.
exit_code() { if [ "${2:-0}" -ne 0 ] || { [ "${lost:-0}" = 1 ] && [ -n "$2" ]; }; then echo "$2"; else echo "$1"; fi; }

# What Slurm knows of this job, into `facts`: nothing where slurmctld does not answer (it restarts, or has much to do), for
# two minutes or the given number of tries.
look_at_job() {
    local tries="${1:-12}"
    until facts="$(scontrol show job "$(slurm_job)")" || [ $((tries -= 1)) -le 0 ]; do sleep 10; done
}

# "JobState" and the like, of `facts`.
job_fact() { sed -n "s/.*\<$1=\([^ ]*\).*/\1/p" <<<"$facts" | head -n 1; }

# Whether Slurm itself has requeued this job, as after `scontrol requeue` or when a node has failed. The job's times are
# then those of the next start.
is_requeued() {
    local restarts
    restarts="$(job_fact Restarts)"
    [ "$(job_fact JobState)" = PENDING ] || [ "${restarts:-0}" -gt "$number" ]
}

# Whether Slurm is ending this job for another reason than its time limit: it was cancelled, or preempted, which Slurm
# follows by a requeue of its own. In both cases the state is COMPLETING while this script still runs.
is_being_ended() {
    local started ended limit
    [ "$(job_fact JobState)" != RUNNING ] || return 1
    [ "$(job_fact StartTime)" != Unknown ] || return 0
    started="$(date -d "$(job_fact StartTime)" +%s)" ended="$(date -d "$(job_fact EndTime)" +%s)"
    limit="$(hours_of "$(job_fact TimeLimit)")"
    [ -z "$limit" ] || awk -v t=$((ended - started)) -v h="$limit" 'BEGIN { exit t < h * 3600 - 1 ? 0 : 1 }'
}

# Attempts in a row, this one included, that have written no new checkpoint step. Noted as the target of a link, which
# also a full disk takes.
count_stalls() {
    local first newest
    first="$(read_number "$attempt/start" 0)" newest="$(read_number "$attempt/checkpoint" 0)"
    stalls=0
    if [ "$newest" -le "$first" ]; then stalls=$(($(readlink "$job_logs/stalls" || echo 0) + 1)); fi
    ln -sfn "$stalls" "$job_logs/stalls" || say "cannot note this attempt in $job_logs/stalls; going on"
}

report_failure() {
    if [ "$rc" -eq 75 ]; then
        say "exit code 75: $(grep 'the next start' "$attempt/rank-00000.log" | tail -n 1)"
        return
    fi
    if [ ! -e "$attempt/rank-00000.log" ]; then
        say "exit code $rc; no rank has started: what srun says is above"
        return
    fi
    say "exit code $rc; the ranks' last words (all in $attempt):"
    # A rank that was killed or hung comes first: the errors of the others only show that their connections broke.
    local verdict='^megatron-tlt: (rank [0-9]+ \(|the job hangs)'
    if grep -hE "$verdict" "$attempt"/rank-*.log; then
        grep -hE -m1 '^megatron-tlt: rank [0-9]+ failed' "$attempt"/rank-*.log | head -n 10 || true
    else
        grep -hE -A12 -m1 '^(megatron-tlt: |Timeout \()' "$attempt"/rank-*.log | head -n 40 || tail -n 5 "$attempt/rank-00000.log"
    fi
}

# Ends the script: with the code of the ranks, or by requeueing.
requeue_or_exit() {
    [ "$rc" -ne 0 ] || { say "done"; exit 0; }
    report_failure || true # what it prints may find no room
    [ "$rc" -ne 2 ] || { say "wrong configuration or arguments: not requeued"; exit 2; }
    if grep -qsE '^megatron-tlt: rank [0-9]+ failed in .*: TrainingError: ' "$attempt"/rank-*.log; then
        say "another attempt would end alike: not requeued" # each one saves a step, so none of them is a stall
        exit "$rc"
    fi
    look_at_job
    if [ -z "$(job_fact JobState)" ]; then
        say "Slurm does not answer: not known whether this job was cancelled or requeued; going on to a requeue"
    elif is_requeued; then
        say "Slurm has requeued this job by itself: nothing to do here"
        exit "$rc"
    elif is_being_ended; then
        say "cancelled or preempted: this script does not requeue it"
        exit "$rc"
    fi
    count_stalls
    [ "$(job_fact Requeue)" != 0 ] || { say "submitted with --no-requeue: not requeued"; exit "$rc"; }
    if [ "$stalls" -gt "${MAX_STALLS:-2}" ]; then
        say "giving up: $stalls attempts in a row have written no new checkpoint step"
        exit "$rc"
    fi
    say "requeueing (attempts in a row without a new checkpoint step: $stalls of ${MAX_STALLS:-2})"
    trap - TERM # Slurm now ends this script with it
    scontrol requeue "$(slurm_job)" || { look_at_job && is_requeued || scontrol requeue "$(slurm_job)"; } ||
        { say "cannot requeue: submit the same command again to resume"; exit "$rc"; }
    sleep 60 # an exit before Slurm ends the script could count as the job's end
}

# "4:00:00", "1-12", "90" and Slurm's other forms, in hours; nothing where there is no limit.
hours_of() {
    awk -v t="$1" 'BEGIN {
        d = 0; has_days = split(t, a, "-") == 2; if (has_days) { d = a[1]; t = a[2] }
        n = split(t, p, ":")
        if (t !~ /^[0-9:]+$/) exit
        if (has_days) h = d * 24 + p[1] + p[2] / 60 + p[3] / 3600
        else if (n == 3) h = p[1] + p[2] / 60 + p[3] / 3600
        else h = p[1] / 60 + p[2] / 3600
        printf "%.9g", h }'
}

# The value of an option in the script's #SBATCH lines.
asked() { sed -n "s/^#SBATCH.* --$1=\([^ ]*\).*/\1/p" "$script" | head -n 1; }

# Warns where Slurm's signal comes so early that an attempt of the time limit $1 gets little or nothing done. $2 is the
# option --signal, "B:USR1@240", or empty. $3: a remark on it.
warn_of_short_time() {
    local hours lead="${2##*@}"
    hours="$(hours_of "$1")"
    if [[ "$2" != *@* ]] || [ -z "$hours" ]; then return 0; fi
    awk -v h="$hours" -v lead="$lead" 'BEGIN { exit h * 3600 + 1 < 2 * lead ? 0 : 1 }' || return 0
    say "WARNING: with a time limit of $1, Slurm's warning $lead s before it (--signal=$2${3:-}) leaves an attempt hardly any time, or none: ask for more time, or for a later warning (above stop.warning_s)"
}

# A shell that outlived its allocation (tmux) may still have SLURM_JOB_ID, and nothing else.
in_a_job() {
    [ -n "${SLURM_JOB_NUM_NODES:-}" ] && [ -n "${SLURM_JOB_NODELIST:-}" ] ||
        die "SLURM_JOB_ID=$SLURM_JOB_ID is set, but this is not a job of Slurm: unset SLURM_JOB_ID, or submit with sbatch"
}

# The first steps of every script: `--dry-run`, usage, environment.
begin() {
    [[ "${MAX_STALLS:-2}" =~ ^[0-9]+$ ]] || die "MAX_STALLS=$MAX_STALLS must be a number, 0 or more"
    [ -z "${REQUEUE:-}" ] || die "REQUEUE=$REQUEUE is not read any more: sbatch --no-requeue submits a job that is not requeued"
    if [ "${1:-}" = --dry-run ]; then
        source "$root/slurm/dry_run.sh"
        dry_run "${@:2}"
    fi
    [ $# -gt 0 ] && [ -n "${SLURM_JOB_ID:-}" ] ||
        die "usage: sbatch [options] $script_name $arguments   (or: $script_name --dry-run [-N NODES] [-t TIME] $arguments)"
    in_a_job
    set_environment
    set_command "$@"
    set_network
}
