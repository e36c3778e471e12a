#!/usr/bin/env bash
# The tests of GPUs, on a machine that has a copy of this checkout and no way out; within 6 minutes.
#   tests/gpu/run.sh OUT    the log and the records are OUT/log and OUT/records.tar
# Sourced, it only makes ready what travels in ignored folders: see CONTRIBUTING.md.
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)
site=$(mktemp -d)
for wheel in "$root"/.whl/*.whl; do python3 -m zipfile -e "$wheel" "$site/python"; done
export PYTHONPATH="$site/python${PYTHONPATH:+:$PYTHONPATH}"
if ! { command -v ip && command -v tc; } >/dev/null; then
    for package in "$root"/.deb/*.deb; do dpkg -x "$package" "$site"; done
    lib=lib/x86_64-linux-gnu
    export PATH="$site/sbin:$site/bin:$PATH" LD_LIBRARY_PATH="$site/$lib:$site/usr/$lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
fi
photos=$root/../shared/data/tiny_coco # where the tests look for them
[ -e "$photos" ] || { mkdir -p "${photos%/*}" && ln -s "$root/.photos/tiny_coco" "$photos"; }

[ "${BASH_SOURCE[0]}" = "$0" ] || return 0
out=${1:?a folder for log and records}
mkdir -p "$out"
out=$(cd -- "$out" && pwd)
cd "$root" || exit
export GPU_RECORDS=$out/records.tar
test=(python3 -m pytest tests/gpu -v -rsP -p no:cacheprovider --durations 20)
{
    nvidia-smi
    command -v ip tc
    timeout -k 15 265 "${test[@]}" -n 8 --dist loadgroup --no-loadscope-reorder -k "not gpus_clock"
    timeout -k 5 60 "${test[@]}" -k gpus_clock
} 2>&1 | tee "$out/log"
