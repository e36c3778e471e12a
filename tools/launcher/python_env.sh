#!/usr/bin/env bash
# Prints the path of a Python that has the packages of requirements.txt, and makes one in .venv if there is none.
#   PYTHON=$(tools/launcher/python_env.sh [PACKAGE ...])
# PACKAGE: further packages to require, and to install where .venv lacks them.
# $PYTHON is taken where it is set. Otherwise the first that has everything: python3 or python on PATH, the active
# virtual or conda environment, .venv. An environment outside this folder is used as it is; nothing is ever installed
# into it. Where one has torch and lacks something else, this says so and ends, before a second one is made in .venv.
# In .venv lie, while it is made: lock, a folder whose maker installs; begun, a sign that an install has not come to its
# end; uv-cache. And whole, which names the packages that are: see python_check.py.

set -euo pipefail
unset CDPATH # with it, cd prints where it went
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
venv=$root/.venv
own=$venv/bin/python
lock=$venv/lock
patience=3600 # seconds to wait for another process that installs
grace=10      # and for one that has not written its name

say() { echo "python_env.sh: $*" >&2; }
die() {
    say "error: $*"
    exit 1
}

# check PYTHON COMMAND [PACKAGE ...]: what python_check.py says of that interpreter.
check() { "$1" "$root/tools/launcher/python_check.py" "$root" "${@:2}" 2>/dev/null; }

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

# ---- the lock: a folder, which mkdir makes for one alone, also where a file system knows no other lock

# Whether a process of this host is there. Its number may have come to another program.
alive() {
    { kill -0 "$1" || ps -p "$1"; } >/dev/null 2>&1 || return 1
    local command
    command=$(ps -o args= -p "$1" 2>/dev/null) || return 0
    [[ $command == *python_env.sh* ]]
}

# What became of the one who made a lock's folder: sets `owner` to self, here, gone, or nameless.
look_at() {
    local owner_user owner_host
    owner=nameless
    { IFS= read -r owner_user && IFS= read -r owner_host && IFS= read -r owner_pid && IFS= read -r owner_time; } \
        2>/dev/null <"$1/owner" || return 0
    owner=here owner_name="process $owner_pid of $owner_user on ${owner_host%% *}"
    [ "$owner_user $owner_host" = "$user $host" ] || return 0
    if [ "$owner_pid" = "$$" ]; then owner=self; elif ! alive "$owner_pid"; then owner=gone; fi
}

# Takes over from one who was killed: who makes a folder `next` in that one's folder is the next owner, and one can.
take_over() {
    local before=$owner
    mkdir "$1/next" 2>/dev/null || return 1
    look_at "$1" # the folder may be another's by now
    if [ "$owner" = "$before" ]; then return; fi
    rmdir "$1/next"
    return 1
}

# Writes this process's name into a folder that it has made. False where another has meanwhile taken that over, for want
# of a name, or where it is gone: of the two, each looks after it has written, so that one of them sees the other.
claim() {
    { printf '%s\n' "$user" "$host" "$$" "$(date '+%Y-%m-%d %H:%M:%S')" >"$1/owner.new" && mv "$1/owner.new" "$1/owner"; } \
        2>/dev/null && [ ! -d "$1/next" ]
}

take_lock() {
    local user host folder seen='' owner owner_name='' owner_pid='' owner_time='' said='' nameless=0 waited=0
    user=$(id -un 2>/dev/null) || user=$(id -u) # of a user without a name some print the number, and fail
    host="$(uname -n) $(readlink /proc/self/ns/pid 2>/dev/null || true)" # containers count their processes apart
    until folder=$lock && mkdir "$folder" 2>/dev/null && claim "$folder"; do
        [ -d "$lock" ] || can_write
        while [ -d "$folder/next" ]; do folder=$folder/next; done
        [ "$folder" = "$seen" ] || nameless=0
        seen=$folder
        look_at "$folder"
        if [ "$owner" = self ]; then # who had begun to take it over has gone back
            break
        elif [ "$owner" = gone ] || { [ "$owner" = nameless ] && [ "$nameless" -ge "$grace" ]; }; then
            if take_over "$folder" && claim "$folder/next"; then
                [ "$owner" = nameless ] || say "$owner_name, which installed into $venv, is gone: going on in its place"
                break
            fi
        elif [ "$owner" = nameless ]; then
            nameless=$((nameless + 1))
        elif [ -z "$said" ]; then
            say "waiting for $owner_name, which installs into $venv since $owner_time. If it is no longer there," \
                "remove the folder $lock"
            said=yes
        fi
        [ "$waited" -lt "$patience" ] ||
            die "after $waited s still waiting for ${owner_name:-another process}: if it is gone, remove the folder $lock"
        sleep 1
        waited=$((waited + 1))
    done
    locked=yes
}

locked=
leave_lock() {
    [ -n "$locked" ] || return 0
    # In one step, so that nobody finds half a lock.
    mv "$lock" "$lock.$$" && rm -rf "$lock.$$"
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
begun_to_make() { [ -e "$venv/begun" ] && [ ! -e "$venv/whole" ]; } # and not come to its end

# An environment with pip, and nothing else yet.
make_venv() {
    say "no Python with torch, torchvision, pycocotools and pillow is active: making $venv"
    find "$venv" -mindepth 1 -maxdepth 1 ! -name lock ! -name uv-cache -exec rm -rf {} +
    touch "$venv/begun"
    run "$base" -m venv "$venv" || die "$base -m venv failed, see above"
}

# What an install that was killed left of a package is no package: without its metadata it is not taken for one.
forget_halves() {
    local site
    for site in "$venv"/lib/python3*/site-packages; do
        find "$site" -maxdepth 1 -name '*.dist-info' \( -newer "$venv/begun" -o ! -exec test -s {}/RECORD \; \) \
            -exec rm -rf {} +
    done
}

get_uv() {
    local output
    if [ -z "$again" ] && "$venv/bin/uv" --version >/dev/null 2>&1; then return; fi
    output=$("$own" -m pip install --quiet --disable-pip-version-check --retries 1 --only-binary :all: \
        ${again:+--force-reinstall} uv 2>&1) && "$venv/bin/uv" --version >/dev/null 2>&1 && return
    output=$(grep ERROR <<<"$output" | tail -n 1)
    why_not="pip cannot get it${output:+: ${output#ERROR: }}"
    return 1
}

# Installs by uv, and by pip where uv cannot. The arguments are pip's, and uv takes the same.
install() {
    local why_not='' code=0 before
    before=$(ls "$venv"/lib/python3*/site-packages)
    if get_uv; then
        run "$own" "$root/tools/launcher/uv_install.py" "$venv" ${again:+--reinstall} "$@" || code=$?
        if [ "$code" -eq 0 ]; then return; fi
        why_not="see above"
        # It may have put a part of its files there.
        if [ "$before" != "$(ls "$venv"/lib/python3*/site-packages)" ]; then again=yes; fi
    fi
    if [ -n "${UV_TORCH_BACKEND:-}" ] && [ "$1" = -r ]; then
        die "UV_TORCH_BACKEND=$UV_TORCH_BACKEND is for uv, which failed ($why_not): start again to go on, or unset it" \
            "to get PyPI's build"
    fi
    say "uv is not used ($why_not): pip installs, which takes some minutes"
    if [ -n "$again" ]; then forget_halves; fi
    run "$own" -m pip install --disable-pip-version-check ${again:+--force-reinstall} "$@" ||
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
    local again='' lacks=0
    if ! starts || begun_to_make; then find_base; fi
    [ -w "${XDG_CACHE_HOME:-${HOME:-/}}" ] || export PIP_NO_CACHE_DIR=1 # pip would warn of it
    can_write
    take_lock
    check "$own" check "$@" >/dev/null && return # by the one that was waited for
    if [ -e "$venv/begun" ]; then again=yes; fi
    if ! starts || begun_to_make; then
        [ -n "$base" ] || find_base
        make_venv
        again=
    elif ! "$own" -m pip --version >/dev/null 2>&1; then
        "$own" -m ensurepip >/dev/null 2>&1 || die "$own has no pip: install it there, or remove $venv"
    fi
    "$own" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || die "$own is older than Python 3.10: remove $venv"
    check "$own" begin "$@" >/dev/null || lacks=$?
    if [ -n "$again" ]; then
        forget_halves
    else
        touch "$venv/begun"
    fi
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
    check "$own" end "$@" >/dev/null || die "the install is not complete: remove $venv and start again"
    rm -f "$venv/begun"
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
    command -v -- "$candidate" >/dev/null || continue
    code=0
    line=$(check "$candidate" check "$@") || code=$?
    case $code in
    0)
        [ -z "$almost" ] || [ "$candidate" != "$own" ] || say "$venv is used, for $almost"
        echo "$line"
        exit 0
        ;;
    10) almost=${almost:-$line} ;;
    11) [[ $candidate != */* ]] || empty=${empty:-$line} ;;
    esac
done
[ -z "$almost" ] || die "$almost"
if [ -n "$chosen" ] && [ "$chosen" != "$own" ]; then
    die "PYTHON is '$chosen'${empty:+, and $empty}: it has to be Python 3.10 or newer with requirements.txt installed;" \
        "or unset it, and .venv is made"
fi
[ -z "$empty" ] || say "$empty: it stays as it is"

base=
trap leave_lock EXIT
trap 'stop 129' HUP
trap 'stop 130' INT
trap 'stop 143' TERM
make "$@"
check "$own" check "$@"
