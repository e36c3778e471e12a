#!/usr/bin/env bash
# Finds or makes the Python environment, and prints its Python. Call it on a login node, before a job:
#   tools/environment.sh
# PYTHON is taken if it is set, else the active python3 if it has a torch that will do, else .venv, which is made. The
# launchers call it with the word `here`: a .venv for this machine. two_nodes.sh, preflight.py and tests/run.sh source
# this file. bash 3.2 is enough for it.
set -euo pipefail
root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
me=$(basename -- "$0")
venv=$root/.venv
# The build of PyTorch for .venv: for this machine's driver, or for a CPU. A UV_TORCH_BACKEND of the user's own wins.
backend=$([ -n "${UV_TORCH_BACKEND:-}" ] || echo auto)

say() {
    echo "$me: $*" >&2
}

die() {
    say "error: $*"
    exit 2
}

# find_python: sets PYTHON; makes .venv if it is needed.
find_python() {
    choose_python && return
    # In the background and a group of its own, because bash acts on a signal at once only while it waits.
    set -m
    make_venv </dev/null >&2 &
    set +m
    local number
    for number in 1 2 15; do # HUP, INT, TERM
        # shellcheck disable=SC2064  # the process and the number are those of now
        trap "kill -TERM -- -$! 2>/dev/null; wait; exit $((128 + number))" "$number"
    done
    wait "$!" || exit
    trap - HUP INT TERM
}

# choose_python: sets PYTHON. Returns 1 if that is .venv's, and has to be made.
choose_python() {
    local active=${PYTHON:-$(command -v python3 || command -v python || true)}
    if [ -n "${PYTHON:-}" ] || { [ -n "$active" ] && [ "${active%/*}" != "$venv/bin" ]; }; then
        look_at "$active"
        if [ -z "$unfit" ]; then
            [ -z "$lacks" ] || die "$active lacks $lacks: $active -m pip install $lacks, or take another Python"
            PYTHON=$active
            return
        fi
        [ -z "${PYTHON:-}" ] || die "PYTHON is '$PYTHON', which $unfit: set another one, or none to have .venv made"
        # That a system's own Python is old, or has no torch, is no news.
        [[ -z ${VIRTUAL_ENV:-}${CONDA_PREFIX:-} && $unfit != "has torch "* ]] ||
            say "$active $unfit: it stays as it is, .venv is used"
    fi
    PYTHON=$venv/bin/python3
    [ ! -e "$venv/begun" ] || return 1 # before a look: another start may end making it meanwhile
    ! is_whole || return 0
    [ -e "$venv" ] || return 1
    # One that is there is the user's to change: other jobs may use it, or it works on another machine.
    [ -n "$unfit" ] || unfit="lacks $lacks: $PYTHON -m pip install $lacks"
    die "$PYTHON $unfit. Or remove $venv: it is then made again"
}

# is_whole: whether .venv can be used, made here or by hand. An install that was cut short has left `begun` there.
is_whole() {
    look_at "$venv/bin/python3"
    [ ! -e "$venv/begun" ] && [ -z "$unfit$lacks" ]
}

# look_at PYTHON: without an import sets `unfit`, what is wrong with it, and `lacks`, the small packages to be added.
look_at() {
    local found
    found=$("$1" -c '
import sys

sys.path = [folder for folder in sys.path if folder]  # not the current one: it may have a torch or a random.py
import re
from importlib import metadata, util

specs = {name: util.find_spec(name) for name in ("torch", "torchvision", "pycocotools", "PIL")}
missing = [name for name, spec in specs.items() if not (spec and spec.origin)]  # a folder alone is no package
# Of a build without a version nothing is known: it is taken as new enough.
version = next((found.version for found in metadata.distributions(name="torch")), "")
numbers = re.match(r"(\d+)\.(\d+)", version)
if sys.version_info < (3, 10):
    print("is older than Python 3.10")
elif missing[:1] in (["torch"], ["torchvision"]):
    print("has no", missing[0])
elif numbers and tuple(map(int, numbers.groups())) < (2, 6):
    print("has torch", version, "and 2.6 is the oldest that will do")
else:
    print()
print(*(name.replace("PIL", "pillow") for name in missing))
' 2>/dev/null) || found="does not work"
    { IFS= read -r unfit; IFS= read -r lacks; } <<<"$found" || true
}

# make_venv: makes .venv, or waits for another start that does.
make_venv() {
    local base
    for base in python3 python3.1{4,3,2,1,0} python ""; do
        case $(command -v "$base") in "$venv"/*) continue ;; esac # it is about to be removed
        ! "$base" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || break
    done
    [ -n "$base" ] || die "there is no Python 3.10 or newer on PATH: install one, or activate an environment with one"
    [ -w "$root" ] || die "$root cannot be written: make an environment elsewhere, and set PYTHON to its interpreter"
    # The kernel's lock, by Python, because macOS has no command for it. It ends with the last process that has the file.
    exec 9>>"$venv.lock"
    local lock='
import fcntl, sys
try:
    fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    print(sys.argv[1], file=sys.stderr)
    fcntl.flock(9, fcntl.LOCK_EX)
except OSError:
    print(sys.argv[2], file=sys.stderr)'
    "$base" -c "$lock" "$me: waiting: another start is making $venv, on $(cat "$venv.lock")" \
        "$me: this file system has no locks: make no other start meanwhile"
    echo "host $(uname -n), process $$" >"$venv.lock"
    if is_whole; then return; fi
    say "making $venv: once, some minutes, up to 5.5 GB on disk"
    rm -rf "${venv:?}/bin" "$venv" # first its Python: another start may look after begun is gone
    mkdir "$venv"
    touch "$venv/begun"
    "$base" -m venv "$venv" ||
        die "$base -m venv failed, see above: is python3-venv installed (Debian, Ubuntu), and room on the disk?"
    install_packages -r "$root/requirements.txt" -r "$root/tools/requirements.txt"
    rm "$venv/begun"
}

# install_packages ARGUMENTS...: installs into .venv by uv, which is several times as fast as pip; by pip if uv fails.
install_packages() {
    local pip=("$venv/bin/python3" -m pip --disable-pip-version-check) index
    local uv=("$venv/bin/uv" pip install --python "$venv/bin/python3")
    index=$("${pip[@]}" config list 2>/dev/null | sed -nE "s/^(global|:env:)\.index-url='(.*)'$/\2/p" | tail -n 1 || true)
    export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-$index}"
    if "${pip[@]}" install --quiet --retries 1 uv; then
        if [ -n "$backend" ]; then
            # Where PyTorch's own index does not answer, uv would try again and again.
            if UV_TORCH_BACKEND=$backend UV_HTTP_RETRIES=0 UV_HTTP_TIMEOUT=5 "${uv[@]}" --dry-run "$@" >/dev/null 2>&1 &&
                UV_TORCH_BACKEND=$backend "${uv[@]}" "$@"; then
                return
            fi
            say "PyTorch's build for this machine cannot be had: installing the default one"
        fi
        if "${uv[@]}" "$@"; then return; fi
    fi
    [ -z "${UV_TORCH_BACKEND:-}" ] ||
        die "UV_TORCH_BACKEND=$UV_TORCH_BACKEND is for uv, which failed, see above: unset it to get the default build"
    say "uv failed, see above: pip installs, which takes some minutes"
    "${pip[@]}" install --retries 1 "$@" ||
        die "pip failed, see above. Is there a network, and room on the disk? Then start again"
}

# has_gpu: by its device file or WSL's driver. nvidia-smi may never return where a GPU fell off its bus.
has_gpu() {
    local file
    for file in /dev/nvidia[0-9]* /usr/lib/wsl/lib/libcuda.so*; do
        [ ! -e "$file" ] || return 0
    done
    return 1
}

if [ "$0" = "${BASH_SOURCE[0]}" ]; then
    # Without a GPU here the default build: nodes with GPUs may share this folder.
    [ "${1:-}" = here ] || has_gpu || backend=
    find_python
    echo "$PYTHON"
fi
