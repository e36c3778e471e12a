# Settings, a command with log and stop signals, how torchrun ended and the last line, several runs and their comparison.
# tools/environment.sh sources it, and through that the launchers, two_nodes.sh and tests/run.sh do.
# shellcheck shell=bash
root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)
me=$(basename -- "$0")
log=     # the run's log: what `run` starts writes there, and this launcher's own lines go there as well
job=     # the process group of what `run` has started
stopped= # the first stop signal that came
waking=  # a signal came during the present wait

say() {
    echo "$me: $*" >&2 || true # a terminal may be gone, a disk full
    [ -z "$log" ] || echo "$me: $*" 2>/dev/null >>"$log" || true
}

die() {
    say "error: $*"
    exit 1
}

# ---- Settings

# set_number NAME DEFAULT LEAST MOST: the variable NAME, or DEFAULT, has to be such a whole number.
set_number() {
    local value=${!1:-$2}
    [[ $value =~ ^[0-9]{1,9}$ ]] || die "$1 is '$value': give a whole number"
    value=$((10#$value)) # without 10# 08 would be octal
    ((value >= $3 && value <= $4)) || die "$1 is $value: give a number from $3 to $4"
    printf -v "$1" '%d' "$value"
}

# set_processes NAME: how many processes this node starts. Sets `node_gpus`, the GPUs that nvidia-smi counts, and `gpus`,
# those to be used.
set_processes() {
    node_gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)
    gpus=$node_gpus
    if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
        gpus=$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | sed '/^-/,$d' | grep -c . || true) # up to -1, as CUDA does
    fi
    if [ "${!1:-}" = all ]; then
        [ "$gpus" -gt 0 ] || die "$1=all, but there is no GPU here: give the number of processes"
        printf -v "$1" '%d' "$gpus"
    fi
    set_number "$1" "$((gpus > 0 ? gpus : 1))" 1 4096
}

# set_threads PROCESSES: the threads of each process of this node; torchrun alone would set 1. The cores are those of the
# affinity or, if a container's CPU quota is less, that, rounded up (cgroup v2's file or v1's two).
set_threads() {
    local cores threads quota period cpu=/sys/fs/cgroup/cpu
    cores=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
    read -rd '' quota period <<<"$(cat "$cpu.max" "$cpu/cpu.cfs_quota_us" "$cpu/cpu.cfs_period_us" 2>/dev/null)" || true
    if [[ $quota =~ ^[0-9]+$ ]] && [ "$quota" -lt "$((cores * period))" ]; then # without a quota: max, or -1
        cores=$(((quota + period - 1) / period))
    fi
    threads=$((cores / $1))
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}"
}

# option NAME ARGUMENTS...: prints the value of an option of the script, or nothing.
option() {
    local name=${1//-/_} word value=
    shift
    while [ "$#" -gt 0 ]; do
        word=${1%%=*} # the script takes dashes inside a name, too
        if [ "${word//-/_}" = "$name" ]; then
            value=${2:-}
            [ "$word" = "$1" ] || value=${1#*=}
        fi
        shift
    done
    printf '%s' "$value"
}

# ---- Arguments

# leave_after_help ARGUMENTS...: prints the calling command's own header, if that is asked for.
leave_after_help() {
    local word
    for word; do
        [[ $word =~ ^(-h|--help)$ ]] || continue
        sed -n '2,/^set /{/^#/s/^# \{0,1\}//p;}' "$0"
        echo "The script's own options: python demo_coco_resnet18.py --help"
        exit
    done
}

# names_no_data ARGUMENTS...: whether the sample set is to be used, because the script's arguments name no data.
names_no_data() {
    local name
    [[ " $* " != *" --dummy "* ]] || return 1
    for name in coco_image_path annotation_path val_image_path val_annotation_path; do
        [ -z "$(option "--$name" "$@")" ] || return 1
    done
}

# ---- A command with a log and stop signals

# set_folder: sets `folder`, that of the logs. Without a RUN_NAME it is a new one, called by the date and time.
set_folder() {
    local logs=${LOG_DIR:-logs}
    folder=$logs/${RUN_NAME:-}
    [ -z "${RUN_NAME:-}" ] || return 0
    mkdir -p "$logs" 2>/dev/null || true
    until folder=$logs/$(date +%Y%m%d-%H%M%S) && mkdir "$folder" 2>/dev/null; do
        [ -d "$folder" ] || die "the folder $folder cannot be made: set LOG_DIR to a folder that can be written"
        sleep 0.2 # another launcher was started in this second
    done
}

# open_log FILE ARGUMENTS...: a log that is there is appended to. Before that set_checkpoint may refuse the run.
open_log() {
    log=
    set_checkpoint "$(dirname -- "$1")" "${@:2}"
    mkdir -p "$(dirname -- "$1")" 2>/dev/null || true
    { : >>"$1"; } 2>/dev/null || die "the log $1 cannot be written: set LOG_DIR to a folder that can"
    log=$1
    if [ -s "$log" ] && [[ " $* " != *" --resume "* ]]; then
        say "$log has a run already: this one is appended. RUN_NAME gives it a folder of its own"
    fi
}

# run COMMAND...: runs a command, and appends to the log what it prints. A stop signal is passed on as SIGTERM, because
# torchrun ignores SIGINT while it waits for other nodes. Returns the command's exit code when nothing of it is left.
run() {
    local code
    # bash acts on a signal at once only while it waits for a job in the background. The job has a process group of its
    # own, so that Ctrl-C reaches it through this script alone. tee lives until the last process has closed the pipe.
    set -m
    "$@" </dev/null 2>&1 | {
        trap '' HUP INT TERM USR1
        tee -a "${log:-/dev/null}" || true # a full disk is no reason to stop
    } &
    set +m
    job=$(jobs -p %+)
    [ -z "$stopped" ] || kill -TERM -- "-$job" 2>/dev/null || true # it came before there was a job
    while true; do
        waking=
        code=0
        wait "$!" || code=$?
        if [ -z "$waking" ] || ! kill -0 -- "-$job" 2>/dev/null; then break; fi
    done
    job=
    return "$code"
}

# shellcheck disable=SC2329  # called by the traps
pass_on() { # SIGNAL
    local signal=TERM
    if [ "$1" = INT ] && [ "$stopped" = INT ]; then signal=KILL; fi # a second Ctrl-C
    stopped=${stopped:-$1}
    waking=yes
    [ -z "$job" ] || kill "-$signal" -- "-$job" 2>/dev/null || true
}

trap '' PIPE # the reader of the output may have gone
for signal in HUP INT TERM USR1; do
    # shellcheck disable=SC2064  # the name is that of now
    trap "pass_on $signal" "$signal"
done

# leave_if_stopped: ends the launcher if a stop signal has come.
leave_if_stopped() {
    [ -n "$stopped" ] || return 0
    say "stopped by SIG$stopped"
    exit $((128 + $(kill -l "$stopped")))
}

# ---- The training

# make_sample: the small data set, made on first use; `sample` are the script's options for it.
make_sample() {
    local folder=$root/data/sample_coco
    run "$PYTHON" "$root/tools/make_sample_coco.py" "$folder" ||
        { leave_if_stopped; die "the sample set was not made: see above"; }
    sample=(--coco_image_path "$folder/train2017")
    sample+=(--annotation_path "$folder/annotations/instances_train2017.json" --weights none)
}

# set_checkpoint FOLDER ARGUMENTS...: sets `checkpoint`, and `resumes` if the run goes on from one.
set_checkpoint() {
    checkpoint=$(option --checkpoint "$@")
    resumes=
    [[ " $* " != *" --resume "* ]] || resumes=yes
    [ "$RESTARTS" -gt 0 ] || return 0
    checkpoint=${checkpoint:-$1/checkpoint.pt}
    # A restart would go on with the older run. Nodes may share the folder: node 0, which writes there, alone looks.
    if [ -z "$resumes" ] && [ -e "$checkpoint" ] && [ "${NODE_RANK:-0}" -eq 0 ]; then
        say "error: checkpoint $checkpoint is there already: give --resume to continue from it, or another --checkpoint or RUN_NAME"
        exit 2
    fi
    resumes=yes # from the first restart on
}

# prefer NAME VALUE: adds an environment variable to those that torchrun is given, unless the user has set it.
prefer() {
    if [ -z "${!1+set}" ]; then
        variables+=("$1=$2")
    elif [ "${!1}" != "$2" ]; then
        say "keeping your $1='${!1}' (the launcher would have used '$2')"
    fi
}

# prefer_for_cpus: what makes a step on a CPU faster.
prefer_for_cpus() {
    # glibc would give the memory of each step back to the kernel, and take it again page by page.
    prefer MALLOC_MMAP_MAX_ 0
    prefer MALLOC_TRIM_THRESHOLD_ 2147483647
    # An OpenMP thread that waits for another one would keep its core busy for about 3 ms. Now a loader worker gets the
    # core after 0.1 ms.
    [ -n "${OMP_WAIT_POLICY:-}" ] || prefer GOMP_SPINCOUNT 10000
}

# start_torchrun ARGUMENTS...: prints and runs torchrun, with `variables` in its environment; then judge_end.
start_torchrun() {
    local begin words code=0 own
    begin=$(wc -c <"$log" 2>/dev/null || echo 0) # 0 where somebody has removed the log
    # Ranks that validate, or write to slow storage, need more than torchrun's 30 seconds for their last checkpoint. A
    # variable, because an older torchrun does not know the option.
    own=("${variables[@]}" PET_SHUTDOWN_TIMEOUT=120)
    words=$(printf ' %q' "${own[@]}" torchrun "$@")
    say "$(date '+%Y-%m-%d %H:%M:%S')${words//\\,/,}"
    run ignoring_usr1 env "${own[@]}" "$PYTHON" -m torch.distributed.run "$@" || code=$?
    judge_end "$code" "$(tail -c "+$((begin + 1))" "$log" | grep -aE "$telling" || true)" "$(tail -n 1 "$log" || true)"
}

# ignoring_usr1 COMMAND...: SLURM sends SIGUSR1 before a time limit, often to all processes. torchrun would die of it.
# The ranks handle it themselves.
ignoring_usr1() {
    trap '' USR1
    exec "$@"
}

# The words of the log by which judge_end knows how a start ended
log_error='\] ERROR: |: error: '           # of a rank; of argparse
log_other_rank='another rank has ended'    # in such a line: not the cause, unless there is no other
log_stopped='\] Stopped on SIG'            # of a rank
log_nccl='Watchdog caught collective operation timeout|NCCL error|Last error:' # of PyTorch
log_signal='Signal .* received'            # of torchrun: it killed a rank
log_exitcode='^ *exitcode +: '             # of torchrun, for each rank
log_apart='^torch.distributed.Dist|EADDRINUSE' # of PyTorch, the last line: the nodes did not meet
telling="$log_error|$log_stopped|$log_nccl|$log_signal|$log_exitcode"

# judge_end CODE LINES LAST: sets `reason`, one line, and `outcome`:
#   complete  all steps are made
#   asked     a stop signal came, and all ranks have saved and stopped
#   user      an error that would come again
#   apart     the nodes did not meet
#   lost      anything else: a restart may help
# CODE is torchrun's, LINES are the telling ones of the log, LAST is its last one. Of the ranks that torchrun lists none is
# the first: some versions list those that torchrun has killed, some do not.
judge_end() {
    local codes errors causes signals
    codes=$(grep -aoE "$log_exitcode-?[0-9]+" <<<"$2" | sed 's/.*: //' || true)
    errors=$(grep -aE "$log_error" <<<"$2" || true)
    if [ "$1" -eq 0 ]; then
        outcome=complete
    elif grep -qaE "$log_stopped" <<<"$2" && { [ "$1" -gt 128 ] || ! grep -qvE '^(75|-15)?$' <<<"$codes"; }; then
        outcome=asked
    elif grep -qx 2 <<<"$codes" && [ -n "$errors" ]; then
        outcome=user
    elif [ -z "$codes" ] && grep -qE "$log_apart" <<<"$3"; then
        outcome=apart
    else
        outcome=lost
    fi
    causes=$(grep -av "$log_other_rank" <<<"$errors" || true)
    signals=$(grep -aE "$log_signal" <<<"$2" | grep -av 'Signal 15 ' || true)
    reason=$(grep -aE "$log_nccl" <<<"$2" || true)
    reason=${reason:-${causes:-${signals:-${errors:-$(grep -aE "$log_exitcode" <<<"$2" || true)}}}}
    reason=${reason:-torchrun ended with $1}
    reason=${reason%%$'\n'*} # the first of these lines
    [ "$outcome" != apart ] || reason=${3#*: }
}

# starts_again: whether another start follows the one of number `start`, which becomes that of the next one.
starts_again() {
    if [ "$outcome" != lost ] || [ -n "$stopped" ] || [ "$start" -gt "$RESTARTS" ]; then return 1; fi
    say "restart $start of $RESTARTS, after: $reason"
    start=$((start + 1))
}

# finish: ends the launcher with what the training came to.
finish() {
    # After a write that fails tee writes no more. Then this fails as well, unless somebody has made room.
    if ! echo "$me: the training has ended" 2>/dev/null >>"$log"; then
        say "error: the log $log cannot be written, and is not whole: is its disk full?"
        [ "$outcome" != complete ] || exit 1
    fi
    if [ "$outcome" = complete ]; then exit 0; fi
    # A stop signal that came between two starts finds no rank: what is saved is the last start's.
    if [ "$outcome" = asked ] || { [ -n "$stopped" ] && [ -n "$resumes" ] && [ -e "$checkpoint" ]; }; then
        say "stopped${stopped:+ by SIG$stopped}${checkpoint:+: --resume goes on from $checkpoint}"
        exit 75
    fi
    leave_if_stopped
    say "error: $reason"
    [ "$outcome" != user ] || exit 2
    exit 1
}

# ---- Several runs, and their comparison

# check_series NAME LIST ARGUMENTS...: whether each LABEL=VALUE of the list, which is that of a variable, may have a run.
check_series() {
    local twice
    [[ " ${*:3} " != *" --resume "* ]] || die "$1 and --resume: it would continue the run before, drop it"
    twice=$(tr ' ' '\n' <<<"$2" | sed 's/=.*//' | sort | uniq -d)
    [ -z "$twice" ] || die "$1 has $twice twice: each run needs a label of its own"
}

# in_order LIST: prints the runs. With REPEATS each LABEL=VALUE becomes LABEL/r1=VALUE, LABEL/r2=VALUE and so on, in rounds.
# Every other round is reversed: the first run reads the images from disk, the others from memory.
in_order() {
    local one round list backwards=
    [ "$REPEATS" -gt 1 ] || echo "$1"
    for one in $1; do backwards="$one $backwards"; done
    for ((round = 1; REPEATS > 1 && round <= REPEATS; round++)); do
        list=$1
        ((round % 2)) || list=$backwards
        for one in $list; do echo "${one%%=*}/r$round=${one#*=}"; done
    done
}

# train_each WHAT LIST ARGUMENTS...: the runs of each LABEL=VALUE of the list, by the launcher's own train_over, with their
# files in `folder`/LABEL; on node 0 their comparison. Ends the launcher. WHAT is what a label names.
# shellcheck disable=SC2154  # the launcher's variables
train_each() {
    local one name file words code=0 compared
    compared=(--report "$folder/compare.md")
    for one in $(in_order "$2"); do
        label=${one%%=*}
        words=("${@:3}")
        for name in --checkpoint --profile; do
            file=$(option "$name" "${@:3}")
            [ -z "$file" ] || words+=("$name" "$folder/$label/$(basename -- "$file")")
        done
        open_log "$folder/$label/node$NODE_RANK.log" "${words[@]}"
        train_over "$one" "${words[@]}"
        case $outcome in
        complete) ;;
        lost) # the others are still worth a run
            say "error: $1 $label: $reason"
            code=1
            ;;
        *) finish ;;
        esac
        leave_if_stopped
    done
    [ "$NODE_RANK" -eq 0 ] || exit "$code"
    [ "$1" = run ] || sleep 3 # in a shared folder the other nodes' last lines may come later
    for one in $2; do compared+=("${one%%=*}=$folder/${one%%=*}"); done
    [ "$1" = run ] || for one in ${LINK_GBPS:-}; do # p1 and p2 are no networks
        compared+=(--link_gbps "$one")
    done
    log= # the comparison has its own file
    if MPLBACKEND=Agg "$PYTHON" -c 'import matplotlib.figure' 2>/dev/null; then # Agg: a notebook's may be missing here
        compared+=(--plot "$folder/compare.png")
    else
        say "skipping the picture, because matplotlib cannot be imported"
    fi
    run "$PYTHON" "$root/tools/compare_logs.py" "${compared[@]}" || code=$?
    exit "$code"
}
