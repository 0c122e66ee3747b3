# `X.sbatch --dry-run`: prints what a submission would run, and submits nothing. Sourced by common.sh.
# shellcheck shell=bash

# Of [OPTIONS OF sbatch] ARGUMENTS: sets `rest`, the arguments, and in `passed` the options that change nothing here and
# are only printed.
read_dry_options() {
    local name value
    nodes="${SLURM_JOB_NUM_NODES:-$(asked nodes)}" tasks="${SLURM_NTASKS_PER_NODE:-$(asked ntasks-per-node)}"
    gpus="${SLURM_GPUS_PER_NODE:-$(asked gpus-per-node)}" time="$(asked time)" signal="$(asked signal)"
    cpus="" elsewhere="" passed=()
    while [ $# -gt 0 ]; do
        case "$1" in
        --elsewhere) elsewhere="$1" && shift && continue ;; # of `check`
        --exclusive | --exclusive=* | --requeue | --no-requeue) passed+=("$1") && shift && continue ;;
        --*=*) name="${1%%=*}" value="${1#*=}" && shift ;;
        -[!-]?*) name="$(long_name "${1:0:2}")" value="${1:2}" && shift ;; # -N4
        -*)
            [ $# -gt 1 ] || die "$1 takes a value"
            name="$(long_name "$1")" value="$2" && shift 2
            ;;
        *) break ;;
        esac
        case "$name" in
        --nodes) nodes="$value" ;;
        --ntasks-per-node) tasks="$value" ;;
        --gpus-per-node) gpus="$value" ;;
        --time) time="$value" ;;
        --cpus-per-task) cpus="$value" && passed+=("$name=$value") ;;
        --signal) signal="$value" && passed+=("$name=$value") ;;
        --partition | --account | --qos | --job-name | --nodelist | --exclude | --constraint | --reservation | --mem | \
            --output | --dependency | --begin | --mail-type | --mail-user | --comment | --licenses | --nice)
            passed+=("$name=$value")
            ;;
        *) die "--dry-run takes the usual options of sbatch (-N, --ntasks-per-node, --gpus-per-node, -t, -c, -p, -A, -q, -J, ...), not $name" ;;
        esac
    done
    [[ "$nodes" =~ ^[1-9][0-9]*$ ]] || die "--nodes=$nodes must be a number above 0"
    [[ "$tasks" =~ ^[1-9][0-9]*$ ]] || die "--ntasks-per-node=$tasks must be a number above 0"
    [[ "$cpus" =~ ^([1-9][0-9]*)?$ ]] || die "--cpus-per-task=$cpus must be a number above 0"
    asked_gpus="$gpus" gpus="${gpus##*:}" # h100:8
    [[ "$gpus" =~ ^[0-9]+$ ]] || die "--gpus-per-node=$gpus must be a number"
    rest=("$@")
}

long_name() {
    case "$1" in
    -N) echo --nodes ;; -t) echo --time ;; -c) echo --cpus-per-task ;; -p) echo --partition ;; -A) echo --account ;;
    -q) echo --qos ;; -J) echo --job-name ;; -w) echo --nodelist ;; -x) echo --exclude ;; -C) echo --constraint ;;
    -o) echo --output ;; -d) echo --dependency ;; -b) echo --begin ;; -L) echo --licenses ;; *) echo "$1" ;;
    esac
}

# Warns where the ranks may take $1 seconds, stop.warning_s, from a signal that comes later than that before the end.
warn_of_late_signal() {
    local lead="${signal##*@}" margin=15 # Slurm's timers were seen 13 s late
    if [ -z "$1" ] || [[ "$signal" != *@* ]]; then return 0; fi
    awk -v s="$1" -v lead="$lead" -v margin="$margin" 'BEGIN { exit s + margin > lead ? 0 : 1 }' || return 0
    say "WARNING: the ranks may take stop.warning_s = $1 s from Slurm's signal, which comes $lead s before the time limit (--signal=$signal) or some seconds later: ask for an earlier one, as --signal=B:USR1@$(awk -v s="$1" 'BEGIN { print int(s + 90) }')"
}

# Prints what a submission would run. `set_command` of each script sets `command` from its arguments. `checked` is the
# subcommand that checks the configuration; empty: none.
dry_run() {
    local hours checker report=""
    read_dry_options "$@"
    [ ${#rest[@]} -gt 0 ] || die "usage: $script_name --dry-run [-N NODES] [...] $arguments"
    export SLURM_JOB_NUM_NODES="$nodes" SLURM_NTASKS_PER_NODE="$tasks" SLURM_GPUS_ON_NODE="$gpus"
    [ -z "$cpus" ] || export SLURM_CPUS_PER_TASK="$cpus"
    set_environment
    set_srun_words # here: the check refuses outputs outside a container's mounts
    set_command "${rest[@]}"
    if [ ${#checked[@]} -gt 0 ]; then
        find_config "${rest[0]}"
        set_command "$config" "${rest[@]:1}"
        checker="$python"
        # The container's interpreter is not available here; the configuration can be checked without it.
        [ -z "${CONTAINER:-}" ] || checker="$root/.venv/bin/python"
        if command -v "$checker" >/dev/null; then
            report="$("$checker" -m megatron_tlt "${checked[@]}" ${elsewhere:+"$elsewhere"} --show-config "$config" \
                "cluster.nodes=$nodes" "cluster.ranks_per_node=$tasks" "${rest[@]:1}" --ranks $((nodes * tasks)))" || exit $?
            echo "$report"
        else
            say "the configuration is not checked: $checker is not there ('make setup' in $root)"
        fi
    fi
    if [ "$gpus" -gt 0 ] && grep -q '^  device: cpu$' <<<"$report"; then
        report="warning: distributed.device is cpu: the job would hold $((nodes * gpus)) GPUs for nothing; submit it with --ntasks-per-node=RANKS --gpus-per-node=0"$'\n'"$report"
    fi
    hours="$(hours_of "$time")"
    printf '\n%s nodes x %s ranks, %s GPUs each, for at most %s: ' "$nodes" "$tasks" "$gpus" "$time"
    if [ -n "$hours" ]; then
        awk -v n="$nodes" -v g="$gpus" -v h="$hours" \
            'BEGIN { printf "%g GPU-hours (%g node-hours) an attempt\n", n * g * h, n * h }'
    else
        echo "GPU-hours not known without a time limit"
    fi
    warn_of_short_time "$time" "$signal"
    warn_of_late_signal "$(sed -n 's/^  warning_s: //p' <<<"$report")"
    printf '\nsbatch -N %s --ntasks-per-node=%s --gpus-per-node=%s --time=%s' "$nodes" "$tasks" "$asked_gpus" "$time"
    printf ' %q' ${passed[@]+"${passed[@]}"} "$script" "${rest[@]}"
    printf '\n  -> srun'
    local word
    for word in "${srun_words[@]}" "${command[@]}"; do
        case "$word" in *=\<*) printf ' %s' "$word" ;; *) printf ' %q' "$word" ;; esac
    done
    printf '\n\n%s:\n' "$script"
    cat "$script"
    [ -z "$report" ] || printf '\n%s:\n%s\n' "$config" "$(grep -E '^ *warning: |^to be fetched |^Fits: ' <<<"$report")"
    exit 0
}
