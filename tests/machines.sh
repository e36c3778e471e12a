#!/usr/bin/env bash
# README's two commands on machines that differ in one thing each, and a table of their seconds and results.
#   sudo tests/machines.sh                              every row: an hour or more on two cores, 12 GB of temporary files
#   sudo tests/machines.sh --rows one_core,other_user   these rows, in the order of the list
#   tests/machines.sh --list                            their names
#   --keep                                              leaves clones, environments and logs where they are
# A row is a fresh clone of what is committed. Rows with the same Python and torch share an environment, which is active
# then; two rows install from nothing. Each command has LIMIT seconds. A row that cannot run says why.
#   tests/machines.sh --quick [--rows ...] [-- ARGUMENTS of pytest]
# In the place of the two commands: a part of the tests, on a copy of this folder, with the python3 of PATH.
# Exit code: 0 if no row has failed. Linux; most rows need root.
# shellcheck disable=SC2030,SC2031  # what is exported for a row's command is meant for its subshell alone
set -euo pipefail
unset CDPATH
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
ME=$ROOT/tests/machines.sh
LIMIT=${LIMIT:-1800} # seconds; one core needs 400 for the tests
USER_ID=61234        # of a user without an entry in /etc/passwd
ODD=$'a folder \303\251'

# Those that have failed on such machines before. tests/run.sh --ci runs them on QUICK_ROWS, so they have to be cheap.
QUICK_ROWS=old_cpu,one_core,other_user
QUICK_FILES="pages demo launchers python_env sample supervise nccl_log nodes"
QUICK_TESTS="commands_on_the_small_set or torchrun_trains or arguments_reach or active_environment_is_used or \
whole_dot_venv or without_a_home or seen_enough or root_cause_is_the_last_line or terminal_that_is_gone or \
no_write_permission or options_are_accepted or interrupted_make or own_name_is_loopback or too_long_for_the_sockets or \
find_a_dead_lock"

rows() { # row NAME ENVIRONMENT FOLDER CONDITION DESCRIPTION
    row nothing - clone as_it_is "as it is, nothing installed"
    row new_user - "$ODD" other_user "another user, a path with a space and an accent, nothing installed"
    row old_cpu python3 "$ODD" old_cpu "a CPU without bf16 (emulated), a path with a space and an accent"
    row odd_path python3 "$ODD" as_it_is "a path with a space and an accent"
    row one_core python3 clone one_core "one core"
    row quota python3 clone quota "a cgroup's quota of one CPU"
    row small_shm python3 clone small_shm "/dev/shm of 1 MB"
    row other_user python3 clone other_user "a user who is not root and has no entry in /etc/passwd"
    row closed_home python3 clone closed_home "a HOME that cannot be written"
    row cdpath python3 clone cdpath "an exported CDPATH"
    row locale python3 clone locale "LC_ALL=C"
    row no_ipv6 python3 clone no_ipv6 "no IPv6, and no network but loopback"
    row python3.11 python3.11 clone as_it_is "Python 3.11"
    row python3.10 python3.10 clone as_it_is "Python 3.10"
    row python3.12 python3.12 clone as_it_is "Python 3.12"
    row python3.13 python3.13 clone as_it_is "Python 3.13"
    row torch2.11 "python3.12 torch==2.11.0 torchvision==0.26.0" clone as_it_is "torch 2.11, torchvision 0.26"
}

say() { echo "machines.sh: $*" >&2; }
die() {
    say "error: $*"
    exit 2
}

# --- The conditions: each runs a command on such a machine -------------------------------------------------------------

as_it_is() { "$@"; }
old_cpu() { own_mounts old_cpu env ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 "$@"; }
one_core() { taskset --cpu-list "$(taskset -cp $$ | sed 's/.*: //; s/[-,].*//')" "$@"; }
# shellcheck disable=SC2016  # for the inner shell to expand
quota() { bash -c 'echo $$ >"$0/cgroup.procs" && exec "$@"' "$cgroup" "$@"; }
small_shm() { own_mounts small_shm "$@"; }
other_user() {
    own_mounts open_ways setpriv --reuid="$USER_ID" --regid="$USER_ID" --clear-groups \
        env -u USER -u LOGNAME HOME="$DEMO_ROW/home" "$@"
}
closed_home() { own_mounts closed_home env -u XDG_CACHE_HOME -u XDG_CONFIG_HOME HOME="$DEMO_ROW/home" "$@"; }
cdpath() { env CDPATH="$DEMO_ROW/elsewhere:." "$@"; }
locale() { env LC_ALL=C "$@"; }
no_ipv6() { unshare --net --mount --propagation private bash "$ME" --inside no_ipv6 "$@"; }
own_mounts() { unshare --mount --propagation private bash "$ME" --inside "$@"; }

# What is changed first, where a condition has namespaces of its own.
inside() {
    case $1 in
    old_cpu) mount --bind "$DEMO_ROW/cpuinfo" /proc/cpuinfo ;;
    small_shm) mount -t tmpfs -o size=1m tmpfs /dev/shm ;;
    closed_home)
        mount --bind "$DEMO_ROW/home" "$DEMO_ROW/home" # not even root may write there
        mount -o remount,ro,bind "$DEMO_ROW/home"
        ;;
    open_ways) open_ways ;;
    no_ipv6)
        # What /sys shows is the network namespace in which it was mounted; cgroups go with it.
        mkdir -p "$DEMO_ROW/cgroup"
        mount --rbind /sys/fs/cgroup "$DEMO_ROW/cgroup"
        mount -t sysfs sysfs /sys
        mount --rbind "$DEMO_ROW/cgroup" /sys/fs/cgroup
        umount --lazy "$DEMO_ROW/cgroup"
        ip link set lo up
        [ ! -e /proc/sys/net/ipv6 ] || sysctl -q -w net.ipv6.conf.all.disable_ipv6=1
        ;;
    esac
}

# Lets other users into the folders above those of $OPEN (a line each): pyenv's Pythons, say, lie in root's home, which
# is closed. What else lies beside them is hidden.
open_ways() {
    local hold path folder n shut=()
    hold=$(mktemp -d /tmp/demo-hold.XXXXXX) # not in TMPDIR, which may lie in one that is to be hidden
    while IFS= read -r path; do
        [ -z "$(closed_above "$path")" ] || shut+=("$path")
    done <<<"$OPEN"
    for ((n = 0; n < ${#shut[@]}; n++)); do
        mkdir "$hold/$n"
        mount --bind "${shut[n]}" "$hold/$n"
    done
    for ((n = 0; n < ${#shut[@]}; n++)); do
        folder=$(closed_above "${shut[n]}")
        [ -z "$folder" ] || mount -t tmpfs -o mode=755 tmpfs "$folder"
        mkdir -p "${shut[n]}"
        mount --move "$hold/$n" "${shut[n]}"
        rmdir "$hold/$n"
    done
    rmdir "$hold"
    cd "$PWD" # which may be another mount by now
}

closed_above() { # PATH: the first folder above it that other users may not enter
    local folder="" part
    while IFS= read -r -d / part; do
        folder=$folder/$part
        if [ -n "$(find "$folder" -maxdepth 0 ! -perm -o=x)" ]; then
            echo "$folder"
            return
        fi
    done <<<"${1#/}"
}

# What a condition needs outside, in the folder of its row. Prints why it cannot be had.
prepare() {
    case $1 in
    as_it_is | cdpath | locale) ;;
    one_core) command -v taskset >/dev/null || echo "needs the command taskset (package util-linux)" ;;
    *) [ "$(id -u)" -eq 0 ] || echo "needs root" ;;
    esac
    case $1 in
    old_cpu) sed -E '/^flags/ s/ (avx512|amx)[a-z0-9_]*//g' /proc/cpuinfo >"$DEMO_ROW/cpuinfo" ;;
    closed_home) chmod 555 "$DEMO_ROW/home" ;;
    cdpath) mkdir -p "$DEMO_ROW/elsewhere/tests" "$DEMO_ROW/elsewhere/tools" ;; # what a relative cd finds first
    quota) make_quota ;;
    other_user) [ "$(id -u)" -ne 0 ] || chown -R "$USER_ID:$USER_ID" "$DEMO_ROW" ;;
    esac
}

make_quota() {
    [ "$(id -u)" -eq 0 ] || return 0
    if [ -e /sys/fs/cgroup/cpu/cpu.cfs_quota_us ]; then # cgroup v1
        mkdir "$cgroup" && echo 100000 | tee "$cgroup/cpu.cfs_period_us" >"$cgroup/cpu.cfs_quota_us"
    elif [ -e /sys/fs/cgroup/cgroup.subtree_control ]; then
        { echo +cpu >/sys/fs/cgroup/cgroup.subtree_control && mkdir "$cgroup" &&
            echo 100000 100000 >"$cgroup/cpu.max"; } 2>/dev/null || echo "this cgroup hands the cpu controller on to none"
    else
        echo "no cgroup with a cpu controller is mounted"
    fi
}

# --- A row -------------------------------------------------------------------------------------------------------------

copy() { # FOLDER: makes it a fresh clone, or with --quick a copy of this folder
    mkdir -p "$1"
    if [ -z "$quick" ]; then
        git clone --quiet --no-hardlinks "$ROOT" "$1"
    else
        tar -C "$ROOT" --exclude=./.git --exclude=./.venv --exclude=./data --exclude=./logs --exclude=__pycache__ \
            -cf - . | tar -C "$1" -xf -
    fi
}

# environment PYTHON [CONSTRAINT ...]: sets `venv`, made once for all rows with the same interpreter and constraints, as a
# user would make it; or `why`, where there is none.
environment() {
    local place real
    real=$("$1" -c 'import os, sys; print(os.path.realpath(sys.executable))' 2>/dev/null) || {
        why="not run: no $1 is on PATH"
        return
    }
    shift
    place=$work/environments/$(printf '%s ' "$real" "$@" | cksum | cut -d' ' -f1)
    if [ ! -e "$place/made" ]; then
        [ -n "$keep" ] || rm -rf "$work/environments" # 5.5 GB each
        copy "$place/clone"
        mkdir "$place/bin"
        printf '#!/bin/sh\nexec "%s" "$@"\n' "$real" >"$place/bin/python3"
        chmod 755 "$place/bin/python3"
        printf '%s\n' "$@" >"$place/constraints"
        say "making an environment with $real $*"
        # A relative path: pip and uv take a list of them, parted by spaces.
        condition=as_it_is clone=$place/clone venv="" limited "$place/log" env PATH="$place/bin:$PATH" \
            PIP_CONSTRAINT=../constraints UV_CONSTRAINT=../constraints tests/run.sh --version
        if [ "$code" -ne 0 ]; then
            why="**failed**: no environment: $(why_failed "$place/log")"
            failures+=("$name")
            tail -n 40 "$place/log" >&2
            return
        fi
        touch "$place/made"
    fi
    venv=$place/clone/.venv python=$place/clone/.venv/bin/python
}

limited() { # LOG COMMAND ...: runs it on the machine of this row; sets `code` and `seconds`
    local log=$1 began=$SECONDS
    shift
    set -m # without it a command in the background would ignore SIGINT, and so would all that it starts
    (
        cd "$clone"
        export DEMO_ROW TMPDIR="$DEMO_ROW/tmp" OPEN
        if [ -n "$venv" ]; then export VIRTUAL_ENV="$venv" PATH="$venv/bin:$PATH"; fi
        "$condition" timeout --kill-after=60 "$LIMIT" "$@"
    ) </dev/null >"$log" 2>&1 &
    set +m
    code=0
    wait "$!" || code=$?
    seconds=$((SECONDS - began))
}

# Ends what the row has started and left, wherever it has moved: each process has DEMO_ROW in its environment.
end_row() {
    local n pids
    for ((n = 0; n < 100; n++)); do
        pids=$(grep -lsaxzF "DEMO_ROW=$DEMO_ROW" /proc/[0-9]*/environ | cut -d/ -f3 || true)
        [ -n "$pids" ] || break
        case $n in
        0)
            say "still running: $(ps -o args= -p "$(paste -sd, <<<"$pids")" | cut -c -200)"
            xargs kill -TERM <<<"$pids" 2>/dev/null || true # pytest then removes what it has made
            ;;
        [5-9]?) xargs kill -KILL <<<"$pids" 2>/dev/null || true ;;
        esac
        sleep 0.2
    done
    [ ! -d "$cgroup" ] || rmdir "$cgroup" || true
}

row() { # NAME ENVIRONMENT FOLDER CONDITION DESCRIPTION
    local name=$1 folder=$3 first=- second=- result="" why="" venv="" python="" left code seconds
    [[ ,$chosen, == *,$name,* ]] || return 0
    condition=$4 DEMO_ROW=$work/$name clone=$work/$name/$folder
    mkdir "$DEMO_ROW" "$DEMO_ROW/home" "$DEMO_ROW/tmp"
    if [ -n "$quick" ]; then
        python=$(python3 -c 'import sys; print(sys.executable)')
    elif [ "$2" != - ]; then
        # shellcheck disable=SC2086  # its words: a program, and constraints
        environment $2
    fi
    if [ -z "$why" ]; then
        OPEN=$DEMO_ROW
        [ -z "$python" ] || OPEN+=$'\n'$("$python" -c 'import sys; print(sys.prefix, sys.base_prefix, sep="\n")')
        copy "$clone"
        why=$(prepare "$condition")
        why=${why:+not run: $why}
    fi
    if [ -n "$why" ]; then
        result=$why
    elif [ -n "$quick" ]; then
        attempt second "$python" -m pytest -q -p no:cacheprovider "${tests[@]}" || true
    elif attempt first ./launch_single.sh; then
        attempt second tests/run.sh || true
    fi
    printf '| %s | %s | %s | %s | %s |\n' "$5" "$(versions)" "$first" "$second" "$result"
    end_row
    left=$(find "$DEMO_ROW/tmp" -mindepth 1 -maxdepth 1 ! -name 'pytest-of-*' ! -name 'torchinductor_*' -printf '%f ' 2>/dev/null || true)
    [ -z "$left" ] || say "$name has left in its temporary folder: $left"
    [ -n "$keep" ] || rm -rf "$DEMO_ROW"
    DEMO_ROW=
}

# attempt first|second COMMAND ...: one command of a row; sets this name to its seconds, and `result`.
attempt() {
    local which=$1 log=$work/logs/$name.$1
    shift
    say "$name: $1, $(date +%H:%M)"
    limited "$log" "$@"
    printf -v "$which" '%s' "$seconds s"
    if [ "$code" -eq 0 ]; then
        result="passed: $(counted "$log")"
        return 0
    fi
    result="**failed**: ${1##*/}, code $code: $(why_failed "$log")"
    case $code in 124 | 137) result="**failed**: ${1##*/} did not end within $LIMIT s" ;; esac
    failures+=("$name")
    tail -n 80 "$log" >&2
    return 1
}

counted() { # LOG: how many tests passed, by pytest's closing line
    sed -nE 's/^=* ?([0-9]+ (passed|failed|error|skipped).*) in [0-9.]+s.*/\1/p' "$1" | sed -E 's/, [0-9]+ deselected//' | tail -n 1
}

why_failed() { # LOG: what failed first, or the last line
    local line
    line=$(grep -m 1 -E '^(FAILED|ERROR) ' "$1" || grep . "$1" | tail -n 1)
    printf '%s' "${line:0:200}" | tr '|' '/'
}

versions() { # of the environment: Python, torch
    [ -n "$python" ] || python=$clone/.venv/bin/python
    "$python" -c 'import platform; from importlib.metadata import version as v; print(platform.python_version(), v("torch"))' \
        2>/dev/null | sed 's/ /, /' || echo -
}

# --- Which rows, and the table -----------------------------------------------------------------------------------------

if [ "${1:-}" = --inside ]; then # see own_mounts
    inside "$2"
    shift 2
    exec "$@"
fi

chosen="" quick="" keep="" tests=()
while [ "$#" -gt 0 ]; do
    case $1 in
    --list)
        row() { printf '%-12s %s\n' "$1" "$5"; }
        rows
        exit
        ;;
    --rows)
        [ "$#" -gt 1 ] || die "--rows needs names, as --list has them: --rows one_core,locale"
        chosen=$2
        shift
        ;;
    --quick) quick=1 ;;
    --keep) keep=1 ;;
    --)
        shift
        tests=("$@")
        break
        ;;
    *) die "unknown option $1: its first lines explain what there is" ;;
    esac
    shift
done
all=$(row() { printf '%s,' "$1"; } && rows)
[ -n "$chosen" ] || chosen=${quick:+$QUICK_ROWS}
[ -n "$chosen" ] || chosen=${all%,}
for name in ${chosen//,/ }; do
    [[ ,$all == *,$name,* ]] || die "no row is called $name: --list has their names"
done
[ "$(uname)" = Linux ] || die "these machines are made by Linux's own means: not run here"
if [ -n "$quick" ]; then
    if [ "${#tests[@]}" -eq 0 ]; then
        cd "$ROOT"
        for name in $QUICK_FILES; do [ ! -e "tests/test_$name.py" ] || tests+=("tests/test_$name.py"); done
        tests+=(-k "$QUICK_TESTS")
    fi
else
    [ "${#tests[@]}" -eq 0 ] || die "arguments of pytest go with --quick"
    git -C "$ROOT" rev-parse --quiet HEAD >/dev/null 2>&1 || die "$ROOT is no git checkout: without one only --quick works"
    [ -z "$(git -C "$ROOT" status --porcelain)" ] || say "what is not committed is not in the clones"
    # Not the environment that happens to be active.
    [ -z "${VIRTUAL_ENV:-}" ] || PATH=$(tr ':' '\n' <<<"$PATH" | grep -vxF "$VIRTUAL_ENV/bin" | paste -sd:)
    unset VIRTUAL_ENV CONDA_PREFIX PYTHON
fi
# What a pytest, or another machines.sh, that has called this one has set is not meant for those here.
for name in "${!PYTEST_@}" DEMO_LONG DEMO_REQUIRE_ALL DEMO_ROW OPEN; do unset "$name"; done

umask 022
work=$(mktemp -d "${TMPDIR:-/tmp}/demo-machines.XXXXXX")
chmod 755 "$work"
mkdir "$work/logs"
cgroup=/sys/fs/cgroup/${work##*/}
[ ! -e /sys/fs/cgroup/cpu/cpu.cfs_quota_us ] || cgroup=/sys/fs/cgroup/cpu/${work##*/}
DEMO_ROW="" failures=()

# shellcheck disable=SC2329  # called by the trap
clean_up() {
    trap '' INT TERM HUP
    [ -z "$DEMO_ROW" ] || end_row
    if [ -n "$keep" ]; then
        say "kept: $work"
    elif [ "${#failures[@]}" -gt 0 ]; then
        find "$work" -mindepth 1 -maxdepth 1 ! -name logs -exec rm -rf {} +
        say "the logs: $work/logs"
    else
        rm -rf "$work"
    fi
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

echo "$(nproc) cores, $(sed -n 's/^model name.*: //p' /proc/cpuinfo | head -n 1), $(uname -sr)${quick:+, a part of the tests}:"
echo
echo "| machine | Python, torch | first command | second command | result |"
echo "|---|---|--:|--:|---|"
rows
[ "${#failures[@]}" -eq 0 ] || die "failed: ${failures[*]}"
