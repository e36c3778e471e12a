#!/usr/bin/env bash
# Finds or makes the Python environment, and prints its Python. Call it on a login node, before a job:
#   tools/environment.sh
# PYTHON is taken if it is set, else the active python3 if it has what requirements.txt asks for, else .venv, which is
# made. The launchers and tests/run.sh source this file for find_python. bash 3.2 is enough for it.
set -euo pipefail
# shellcheck source=tools/launching.sh
source "$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)/launching.sh"
venv=$root/.venv

# glibc would give the memory of each step back to the kernel, and take it again page by page.
export MALLOC_MMAP_MAX_="${MALLOC_MMAP_MAX_-0}" MALLOC_TRIM_THRESHOLD_="${MALLOC_TRIM_THRESHOLD_-2147483647}"
# An OpenMP thread that waits for another one would keep its core busy for about 3 ms. Now a loader worker gets the core
# after 0.1 ms.
[ -n "${OMP_WAIT_POLICY:-}" ] || export GOMP_SPINCOUNT="${GOMP_SPINCOUNT:-10000}"

# find_python: sets PYTHON.
find_python() {
    local active lacks
    active=$(command -v python3 || command -v python || true)
    if [ -n "${PYTHON:-}" ]; then
        command -v "$PYTHON" >/dev/null || die "PYTHON is '$PYTHON', which is no program"
        lacks=$(missing_from "$PYTHON")
        [ -z "$lacks" ] || die "PYTHON is '$PYTHON', which lacks $lacks: $PYTHON -m pip install -r requirements.txt"
    elif [ -n "$active" ] && [ "${active%/*}" != "$venv/bin" ] && has "$active" torch; then
        lacks=$(missing_from "$active")
        [ -z "$lacks" ] ||
            die "$active lacks $lacks: $active -m pip install -r requirements.txt, or deactivate that environment"
        PYTHON=$active
    else
        PYTHON=$venv/bin/python3
        if ! is_whole; then
            if ! run make_venv >&2; then
                leave_if_stopped
                exit 1
            fi
        fi
    fi
}

# is_whole: whether .venv can be used, made here or by hand. An install that was cut short has left `begun` there.
is_whole() {
    [ ! -e "$venv/begun" ] && "$venv/bin/python3" -c '' 2>/dev/null && [ -z "$(missing_from "$venv/bin/python3")" ]
}

has() { # PYTHON MODULE
    "$1" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)' "$2" 2>/dev/null
}

# missing_from PYTHON: prints what requirements.txt asks for and this Python does not have.
missing_from() {
    local module version minor lacks=""
    for module in torch torchvision pycocotools PIL; do
        has "$1" "$module" || lacks="$lacks $module"
    done
    # A build without this metadata is taken as new enough.
    version=$("$1" -c 'import importlib.metadata; print(importlib.metadata.version("torch"))' 2>/dev/null || true)
    minor=${version#*.}
    if [ -n "$version" ] && [ $((${version%%.*} * 1000 + ${minor%%.*})) -lt 2011 ]; then
        lacks="$lacks torch>=2.11 (it has $version)"
    fi
    echo "${lacks# }"
}

# make_venv: makes .venv, or waits for another start that does.
make_venv() {
    local base="" name said=""
    for name in python3 python3.14 python3.13 python3.12 python3.11 python3.10 python; do
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            base=$name
            break
        fi
    done
    [ -n "$base" ] || die "there is no Python 3.10 or newer on PATH: install one, or activate an environment with one"
    "$base" -c 'import ensurepip, venv' 2>/dev/null ||
        die "$base cannot make environments: install python3-venv (Debian, Ubuntu: apt install python3-venv)"
    [ -w "$root" ] || die "$root cannot be written: make an environment elsewhere, and set PYTHON to its interpreter"
    until mkdir "$venv.lock" 2>/dev/null; do
        [ -n "$said" ] || say "another start is making $venv: waiting. If there is none, remove $venv.lock"
        said=yes
        sleep 1
    done
    trap 'rmdir "$venv.lock"' EXIT
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

# install_packages ARGUMENTS...: installs into .venv by uv, which is several times as fast as pip; by pip if uv fails.
install_packages() {
    local pip=("$venv/bin/python3" -m pip --disable-pip-version-check) index
    index=$("${pip[@]}" config list 2>/dev/null | sed -nE "s/^(global|:env:)\.index-url='(.*)'$/\2/p" | tail -n 1 || true)
    if "${pip[@]}" install --quiet --retries 1 uv &&
        UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-$index} "$venv/bin/uv" pip install --python "$venv/bin/python3" "$@"; then
        return
    fi
    [ -z "${UV_TORCH_BACKEND:-}" ] ||
        die "UV_TORCH_BACKEND=$UV_TORCH_BACKEND is for uv, which failed, see above: unset it to get PyPI's build"
    say "uv failed, see above: pip installs, which takes some minutes"
    "${pip[@]}" install --retries 1 "$@" ||
        die "pip failed, see above. Is there a network, and room on the disk? Then start again"
}

if [ "$0" = "${BASH_SOURCE[0]}" ]; then
    find_python
    echo "$PYTHON"
fi
