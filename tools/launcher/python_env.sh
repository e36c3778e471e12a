#!/usr/bin/env bash
# Prints the path of a Python that has the packages of requirements.txt, and makes one in .venv if there is none.
#   PYTHON=$(tools/launcher/python_env.sh [PACKAGE ...])
# PACKAGE: further packages to require, and to install where .venv lacks them.
# $PYTHON is taken where it is set. Otherwise the first that has everything: python3 or python on PATH, the active
# virtual or conda environment, .venv. An environment outside this folder is used as it is; nothing is ever installed
# into it. Where one has torch and lacks something else, this says so and ends, before a second one is made in .venv.
# In .venv lie, while something is installed there: lock, a link that names who does so; begun, which names what, so that
# it does not count before the end; uv-cache.

set -euo pipefail
unset CDPATH # with it, cd prints where it went
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
venv=$root/.venv
own=$venv/bin/python
lock=$venv/lock
patience=3600 # seconds to wait for another process that installs

say() { echo "python_env.sh: $*" >&2; }
die() {
    say "error: $*"
    exit 1
}

# check PYTHON [PACKAGE ...]: what python_check.py says of that interpreter.
check() { "$1" "$root/tools/launcher/python_check.py" "$root" check "${@:2}" 2>/dev/null; }

# Runs a program that may take long, so that a signal ends it and not this shell alone.
child=
run() {
    local code=0
    "$@" >&2 &
    child=$!
    wait "$child" || code=$?
    child=
    return "$code"
}
stop() {
    trap '' INT TERM HUP
    if [ -n "$child" ]; then
        kill -TERM "$child" 2>/dev/null || true
        wait "$child" || true
    fi
    exit "$1"
}

# ---- the lock: a link to its owner's name, which a file system makes for one alone, also where it knows no other lock

# Whether a process of this host is gone. Its number may have come to another program.
is_gone() {
    local command
    { kill -0 "$1" || ps -p "$1"; } >/dev/null 2>&1 || return 0
    command=$(ps -o args= -p "$1" 2>/dev/null) || return 1
    [[ $command != *python_env.sh* ]]
}

take_lock() {
    local user here owner pid place space since said='' waited=0
    user=$(id -un 2>/dev/null) || user=$(id -u) # of a user without a name some print the number, and fail
    # Containers count their processes apart.
    here="$user on $(uname -n)|$(readlink /proc/self/ns/pid 2>/dev/null || true)"
    until ln -s "$$|$here|$(date '+%Y-%m-%d %H:%M:%S')" "$lock" 2>/dev/null; do
        owner=$(readlink "$lock") || can_write # or it has just been released
        IFS='|' read -r pid place space since <<<"$owner"
        if [ "$place|$space" = "$here" ] && is_gone "$pid" && mkdir "$lock.next" 2>/dev/null; then
            # One of those who see it takes the link away, unless another has done so before.
            if [ "$(readlink "$lock")" = "$owner" ]; then
                say "process $pid of $place, which installed into $venv, is gone: going on in its place"
                rm -f "$lock"
            fi
            rmdir "$lock.next"
            continue
        fi
        if [ -n "$owner" ] && [ -z "$said" ]; then
            say "waiting for process $pid of $place, which installs into $venv since $since. If it is no longer" \
                "there, remove $lock"
            said=yes
        fi
        [ "$waited" -lt "$patience" ] ||
            die "after $waited s still waiting for process $pid of $place: if it is gone, remove $lock"
        sleep 1
        waited=$((waited + 1))
    done
    locked=yes
}

locked=
leave_lock() {
    [ -z "$locked" ] || rm -f "$lock"
    locked=
}

# ---- .venv

can_write() {
    mkdir -p "$venv" 2>/dev/null && [ -w "$venv" ] && return
    die "cannot write to $venv, and no Python with requirements.txt is active: make one elsewhere and set PYTHON to" \
        "its interpreter (docs/install.md says how)"
}

# A Python that can make .venv.
find_base() {
    local name
    base=
    for name in python3 python3.14 python3.13 python3.12 python3.11 python3.10 python; do
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            base=$name
            break
        fi
    done
    [ -n "$base" ] || die "no Python 3.10 or newer on PATH (python3 is" \
        "$(python3 --version 2>&1 || true)): install one, or activate an environment that has one"
    "$base" -c 'import ensurepip, venv' 2>/dev/null ||
        die "$base cannot make virtual environments: install python3-venv (Debian, Ubuntu:" \
            "apt install python3-venv), or activate an environment with requirements.txt installed"
}

starts() { "$own" -c 'pass' 2>/dev/null; }
# An install of everything was cut short: its file has no name of a further package.
half_made() { [ -e "$venv/begun" ] && ! grep -q . "$venv/begun"; }
begin() { printf '%s\n' "$@" >"$venv/begun"; }

# An environment with pip, and nothing else yet.
make_venv() {
    find_base
    if half_made; then
        say "the install into $venv did not come to its end: making it anew"
    else
        say "no Python with torch, torchvision, pycocotools and pillow is active: making $venv"
    fi
    begin
    find "$venv" -mindepth 1 -maxdepth 1 ! -name 'lock*' ! -name begun ! -name uv-cache -exec rm -rf {} +
    run "$base" -m venv "$venv" || die "$base -m venv failed, see above"
}

packages() { ls "$venv"/lib/python3*/site-packages; }

get_uv() {
    local output
    if "$venv/bin/uv" --version >/dev/null 2>&1; then return; fi
    output=$("$own" -m pip install --quiet --disable-pip-version-check --retries 1 --only-binary :all: \
        --ignore-installed uv 2>&1) && "$venv/bin/uv" --version >/dev/null 2>&1 && return
    output=$(grep ERROR <<<"$output" | tail -n 1)
    why_not="pip cannot get it${output:+: ${output#ERROR: }}"
    return 1
}

# Installs by uv, and by pip where uv cannot. The arguments are pip's, and uv takes the same.
install() {
    local why_not='' again='' before
    if grep -qs . "$venv/begun"; then again=yes; fi # these, but it has not come to its end
    if [ "$1" != -r ]; then begin "$@"; else begin; fi
    get_uv || true
    before=$(packages)
    if [ -z "$why_not" ]; then
        if run "$own" "$root/tools/launcher/uv_install.py" "$venv" ${again:+--reinstall} "$@"; then return; fi
        why_not="see above"
    fi
    if [ -n "${UV_TORCH_BACKEND:-}" ] && [ "$1" = -r ]; then
        die "UV_TORCH_BACKEND=$UV_TORCH_BACKEND is for uv, which failed ($why_not): start again to go on, or unset it" \
            "to get PyPI's build"
    fi
    say "uv is not used ($why_not): pip installs, which takes some minutes"
    if [ "$before" != "$(packages)" ]; then # it has put a part of its files there
        again=yes
        if [ "$1" = -r ]; then make_venv; fi
    fi
    run "$own" -m pip install --disable-pip-version-check ${again:+--ignore-installed} "$@" && return
    if [ -z "$again" ] && [ "$before" = "$(packages)" ]; then rm -f "$venv/begun"; fi # nothing is half there
    die "pip failed, see above: start again to go on, or activate an environment with requirements.txt installed"
}

# The line before an install of some size.
announce() {
    local what="requirements.txt${1:+ and $*} into $venv" hint=
    if [ -n "${UV_TORCH_BACKEND:-}" ]; then
        say "installing $what, with PyTorch's build for $UV_TORCH_BACKEND: once, a minute or more"
        return
    fi
    if [ "$(uname)" = Linux ] && [ ! -e /dev/nvidiactl ] && ! command -v nvidia-smi >/dev/null; then
        hint=". No NVIDIA GPU is seen here: with UV_TORCH_BACKEND=cpu set, it would be some 200 MB of downloads"
    fi
    say "installing $what: once, a minute or more, up to 5.5 GB on disk$hint"
}

try_imports() {
    local output
    output=$("$own" "$root/tools/launcher/python_check.py" "$root" try "$@" 2>&1) ||
        die "what was installed does not work (${output##*$'\n'}): remove $venv and start again"
}

# Makes .venv, or completes it.
make() {
    local lacks=0
    if ! starts || half_made; then find_base; fi
    [ -w "${XDG_CACHE_HOME:-${HOME:-/}}" ] || export PIP_NO_CACHE_DIR=1 # pip would warn of it
    can_write
    take_lock
    check "$own" "$@" >/dev/null || lacks=$?
    if [ "$lacks" -eq 0 ]; then return; fi # by the one that was waited for
    if ! starts || half_made; then
        make_venv
    elif ! "$own" -m pip --version >/dev/null 2>&1; then
        "$own" -m ensurepip >/dev/null 2>&1 || die "$own has no pip: install it there, or remove $venv"
    fi
    "$own" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || die "$own is older than Python 3.10: remove $venv"
    if [ "$lacks" -eq 13 ]; then
        say "installing $* into $venv"
        install "$@"
        try_imports "$@"
    else
        announce "$@"
        install -r "$root/requirements.txt" "$@"
        say "trying it: the first import takes some seconds"
        try_imports torch torchvision pycocotools pillow matplotlib "$@"
    fi
    rm -f "$venv/begun"
    check "$own" "$@" >/dev/null || die "the install is not complete: remove $venv and start again"
    rm -rf "$venv/uv-cache"
}

# ---- which Python

almost= # the line on a Python that has torch and lacks something else
empty=  # the line on an active environment that has no torch
candidates=(python3 python)
for environment in "${VIRTUAL_ENV:-}" "${CONDA_PREFIX:-}"; do
    [ -z "$environment" ] || candidates+=("$environment/bin/python")
done
candidates+=("$own")
chosen=${PYTHON:-}
if [ -n "$chosen" ]; then
    folder=$(cd "$(dirname "$chosen")" 2>/dev/null && pwd) || folder=
    if [ "$folder" = "$venv/bin" ] || [ "$chosen" = .venv/bin/python ]; then chosen=$own; fi
    candidates=("$chosen")
    [ "$chosen" = "$own" ] || command -v -- "$chosen" >/dev/null || die "PYTHON is '$chosen', which is no program"
fi

for candidate in "${candidates[@]}"; do
    code=0
    line=$(check "$candidate" "$@") || code=$?
    case $code in
    0)
        [ -z "$almost" ] || [ "$candidate" != "$own" ] || say "$venv is used, for $almost"
        echo "$line"
        exit 0
        ;;
    10) almost=${almost:-$line} ;;
    11) [[ $candidate != */* ]] || empty=${empty:-$line} ;;
    *) ;; # it does not start, or is not there
    esac
done
[ -z "$almost" ] || die "$almost"
if [ -n "$chosen" ] && [ "$chosen" != "$own" ]; then
    die "PYTHON is '$chosen'${empty:+, and $empty}: it has to be Python 3.10 or newer with requirements.txt installed;" \
        "or unset it, and .venv is made"
fi
[ -z "$empty" ] || say "$empty: it stays as it is"

trap leave_lock EXIT
trap 'stop 129' HUP
trap 'stop 130' INT
trap 'stop 143' TERM
make "$@"
check "$own" "$@"
