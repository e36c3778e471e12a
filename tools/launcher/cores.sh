#!/usr/bin/env bash
# Prints how many cores this process may use: those it is bound to, or fewer where a cgroup limits its CPU time.
#   tools/launcher/cores.sh
# A test gives the folder in which proc and sys lie.
set -euo pipefail

root=${1:-}
unset OMP_NUM_THREADS OMP_THREAD_LIMIT # nproc would print them in place of the cores
cores=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)

# limit QUOTA PERIOD: so much CPU time in so much time, in microseconds. No limit is `max`, or -1.
limit() {
    [[ $1 =~ ^[0-9]+$ && $2 =~ ^[1-9][0-9]*$ ]] || return 0
    local allowed=$((($1 + $2 - 1) / $2)) # half a core counts as one
    if ((0 < allowed && allowed < cores)); then cores=$allowed; fi
}

# read_limits FOLDER: of one cgroup, version 2 or 1.
read_limits() {
    local quota="" period=""
    if [ -r "$1/cpu.max" ]; then
        read -r quota period <"$1/cpu.max" || true
    elif [ -r "$1/cpu.cfs_quota_us" ] && [ -r "$1/cpu.cfs_period_us" ]; then
        read -r quota <"$1/cpu.cfs_quota_us" || true
        read -r period <"$1/cpu.cfs_period_us" || true
    fi
    limit "$quota" "$period"
}

# Lines such as `0::/user.slice` (version 2) and `4:cpu,cpuacct:/pod7` (version 1).
while IFS=: read -r _ controllers group; do
    case ,$controllers, in
    ,,) mount=$root/sys/fs/cgroup ;;
    *,cpu,*) mount=$root/sys/fs/cgroup/cpu ;;
    *) continue ;;
    esac
    # Each group above the own one can have a limit, too. In a container it is at the mount's root, where the path of
    # the own one need not exist.
    while [ -n "$group" ]; do
        read_limits "$mount$group"
        group=${group%/*}
    done
    read_limits "$mount"
done < <(cat "$root/proc/self/cgroup" 2>/dev/null || true)
echo "$cores"
