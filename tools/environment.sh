#!/usr/bin/env bash
# Finds or makes the Python environment, and prints its Python. Call it on a login node, before a job:
#   tools/environment.sh
# PYTHON is taken if it is set, else the active python3 if it has a torch that will do, else .venv, which is made. The
# launchers and tests/run.sh source this file for find_python. bash 3.2 is enough for it.
set -euo pipefail
# shellcheck source=tools/launcher/common.sh
source "$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)/launcher/common.sh"
venv=$root/.venv
lock=$venv.lock
# The build of PyTorch for .venv: for this machine's driver, or for a CPU. A UV_TORCH_BACKEND of the user's own wins.
backend=auto
[ -z "${UV_TORCH_BACKEND:-}" ] || backend=

# glibc would give the memory of each step back to the kernel, and take it again page by page.
export MALLOC_MMAP_MAX_="${MALLOC_MMAP_MAX_-0}" MALLOC_TRIM_THRESHOLD_="${MALLOC_TRIM_THRESHOLD_-2147483647}"
# An OpenMP thread that waits for another one would keep its core busy for about 3 ms. Now a loader worker gets the core
# after 0.1 ms.
[ -n "${OMP_WAIT_POLICY:-}" ] || export GOMP_SPINCOUNT="${GOMP_SPINCOUNT:-10000}"

# find_python: sets PYTHON, and `torch`, the folder of its torch.
find_python() {
    local active
    if [ -n "${PYTHON:-}" ]; then
        command -v "$PYTHON" >/dev/null || die "PYTHON is '$PYTHON', which is no program"
        look_at "$PYTHON"
        [ -z "$unfit" ] || die "PYTHON is '$PYTHON', which $unfit: set another one, or none to have .venv made"
        [ -z "$lacks" ] || die "PYTHON is '$PYTHON', which lacks $lacks: $PYTHON -m pip install $lacks"
        return
    fi
    active=$(command -v python3 || command -v python || true)
    if [ -n "$active" ] && [ "${active%/*}" != "$venv/bin" ]; then
        look_at "$active"
        if [ -z "$unfit" ]; then
            [ -z "$lacks" ] || die "$active lacks $lacks: $active -m pip install $lacks, or deactivate that environment"
            PYTHON=$active
            return
        fi
        # Not of each system's own Python, where no environment is active.
        [ -z "${VIRTUAL_ENV:-}${CONDA_PREFIX:-}$torch" ] || say "$active $unfit: it stays as it is, .venv is used"
    fi
    PYTHON=$venv/bin/python3
    is_whole && return
    # One that was made by hand, or lacks what a newer version asks for, is the user's to change.
    if [ ! -e "$venv/begun" ] && [ "$unfit" != "does not work" ]; then
        [ -n "$unfit" ] || unfit="lacks $lacks: $PYTHON -m pip install $lacks"
        die "$PYTHON $unfit. Or remove $venv: it is then made again"
    fi
    if ! run make_venv >&2; then
        leave_if_stopped
        exit 1
    fi
    look_at "$PYTHON"
}

# is_whole: whether .venv can be used, made here or by hand. An install that was cut short has left `begun` there.
is_whole() {
    look_at "$venv/bin/python3"
    [ ! -e "$venv/begun" ] && [ -z "$unfit$lacks" ]
}

# look_at PYTHON: without an import sets `unfit`, what is wrong with it, `lacks`, the small packages to be added, and
# `torch`, the folder of its torch.
look_at() {
    local found
    found=$("$1" -c '
import re, sys
from importlib import metadata, util

specs = {name: util.find_spec(name) for name in ("torch", "torchvision", "pycocotools", "PIL")}
missing = [name for name, spec in specs.items() if not spec]
try:
    version = metadata.version("torch")
except metadata.PackageNotFoundError:
    version = ""  # of such a build nothing is known: it is taken as new enough
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
print(*(specs["torch"].submodule_search_locations if specs["torch"] else []))
' 2>/dev/null) || found="does not work"
    { IFS= read -r unfit; IFS= read -r lacks; IFS= read -r torch; } <<<"$found" || true
}

# check_build ARGUMENTS...: ends the launcher where the node has GPUs, and torch was built without CUDA and ROCm.
check_build() {
    local advice="install a build with CUDA or ROCm in its environment"
    if [ "$gpus" -eq 0 ] || [ "$node_gpus" -eq 0 ] || [ "$(option --device "$@")" = cpu ]; then return; fi
    grep -q '^cuda[: ].*None' "$torch/version.py" 2>/dev/null || return 0
    ! grep -qE "^(hip|rocm)[: ].*'" "$torch/version.py" || return 0
    [ "$PYTHON" != "$venv/bin/python3" ] ||
        advice="remove $venv, then call tools/environment.sh or set UV_TORCH_BACKEND, for example to cu126"
    die "this node has GPUs, but the torch of $PYTHON is a build for CPUs: $advice. --device cpu trains without them"
}

# make_venv: makes .venv, or waits for another start that does.
make_venv() {
    local base="" name
    for name in python3 python3.14 python3.13 python3.12 python3.11 python3.10 python; do
        case $(command -v "$name") in "$venv"/*) continue ;; esac # it is about to be removed
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            base=$name
            break
        fi
    done
    [ -n "$base" ] || die "there is no Python 3.10 or newer on PATH: install one, or activate an environment with one"
    "$base" -c 'import ensurepip, venv' 2>/dev/null ||
        die "$base cannot make environments: install python3-venv (Debian, Ubuntu: apt install python3-venv)"
    [ -w "$root" ] || die "$root cannot be written: make an environment elsewhere, and set PYTHON to its interpreter"
    lock_venv
    trap unlock_venv EXIT
    trap 'exit 143' TERM
    if is_whole; then return; fi
    say "making $venv: once, some minutes, up to 5.5 GB on disk"
    rm -rf "$venv"
    mkdir "$venv"
    touch "$venv/begun"
    "$base" -m venv "$venv" || die "$base -m venv failed, see above: is there room on the disk?"
    install_packages -r "$root/requirements.txt"
    rm "$venv/begun"
}

# lock_venv: takes .venv.lock, or waits for it. It is a folder, because macOS has no flock. `owner` in it says whose it
# is: host, process, and on Linux the namespace of the process.
lock_venv() {
    local host space process owner mine hint waited=0
    host=$(uname -n)
    space=$(readlink /proc/self/ns/pid || true)
    mine="$host $(exec sh -c 'echo "$PPID"') $space" # of this subshell: it may outlive the launcher
    until mkdir "$lock" 2>/dev/null; do
        owner=$(cat "$lock/owner" 2>/dev/null || true)
        process=${owner#* }
        process=${process%% *}
        if [ -n "$owner" ] && [ "$owner" = "$host $process $space" ] && ! is_alive "$process"; then
            # NOTE: one heir at a time. An earlier one may have taken the lock over since `owner` was read.
            if mkdir "$lock/heir" 2>/dev/null; then
                if [ "$(cat "$lock/owner")" = "$owner" ]; then break; fi
                rmdir "$lock/heir" 2>/dev/null || true # with the lock that it lay in
            fi
        fi
        hint=". If there is none, remove $lock"
        [ -z "$owner" ] || hint=" (host, process: $owner)"
        [ "$waited" -gt 0 ] || say "another start is making $venv: waiting$hint"
        waited=$((waited + 1))
        [ "$waited" -le 1800 ] || die "waited 30 minutes for another start: if it is gone, remove $lock, then start again"
        sleep 1
    done
    echo "$mine" >"$lock/owner"
    rmdir "$lock/heir" 2>/dev/null || true
}

# shellcheck disable=SC2329  # called by a trap
unlock_venv() { # all of it at once
    mv "$lock" "$lock.$$" && rm -r "$lock.$$"
}

is_alive() { # PROCESS, perhaps of another user
    [ -e "/proc/$1" ] || ps -p "$1" >/dev/null 2>&1
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

if [ "$0" = "${BASH_SOURCE[0]}" ]; then
    # Without a GPU here the default build: nodes with GPUs may share this folder.
    # No pipe: grep ends it at the first line, and by pipefail it fails if nvidia-smi is not done.
    grep -q '^GPU' <<<"$(nvidia-smi -L 2>/dev/null)" || backend=
    find_python
    echo "$PYTHON"
fi
