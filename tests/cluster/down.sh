#!/usr/bin/env bash
# Tear down the cluster in LAB (${TMPDIR:-/tmp}/hw-lab unless set), however far up.sh got.
# Only processes that name LAB in their environment or arguments are ended: a stale pid file can never hit a stranger.
# KEEP=1 leaves the directory, and so the logs, in place.
set -uo pipefail
PATH=$PATH:/usr/sbin:/sbin
LAB=${LAB:-${TMPDIR:-/tmp}/hw-lab}
[ -e "$LAB/env.sh" ] || { echo "nothing at $LAB"; exit 0; }
. "$LAB/env.sh"

ours() {  # which of these processes name LAB in their environment or arguments
  local pid
  for pid in "$@"; do
    grep -qszF "$LAB/" "/proc/$pid/environ" "/proc/$pid/cmdline" && echo "$pid"
  done
}

running() {  # a zombie does not run: an init that polls may take seconds to reap it
  local pid
  for pid in "$@"; do
    grep -qs '^State:.[^ZX]' "/proc/$pid/status" && return 0
  done
  return 1
}

gone() {  # LOOKS PID...: wait until none of them runs
  local looks=$1
  shift
  for _ in $(seq "$looks"); do running "$@" || return 0; sleep 0.05; done
  return 1
}

stop() {  # SIGNAL SECONDS PID...: signal those that are ours, wait for all of them, KILL what is left
  local name=$1 seconds=$2 found
  shift 2
  found=$(ours "$@")
  [ -n "$found" ] || return 0
  kill "-$name" $found 2>/dev/null
  gone $((seconds * 20)) $found && return 0
  found=$(ours $found)
  [ -n "$found" ] || return 0
  kill -KILL $found 2>/dev/null
  gone 200 $found  # on a busy machine what was killed lives on for a moment
}

pids() { cat "$LAB"/pids/$1.pid 2>/dev/null; }  # $1 may be a pattern

first_processes() {  # PID 1 of each node: a PID namespace is empty once that one has gone
  local pid
  for pid in $(pids 'node-*'); do cat "/proc/$pid/task/$pid/children" 2>/dev/null; done
}

steps() {  # plain mode has no PID namespaces that would end the steps, and their tasks, with their node
  grep -lsx slurmstepd /proc/[0-9]*/comm | cut -d/ -f3
  grep -lsz '^SLURMD_NODENAME=' /proc/[0-9]*/environ | cut -d/ -f3
}

cancel_jobs() {
  for _ in $(seq 100); do
    [ -n "$(timeout 5 squeue -h 2>/dev/null)" ] || return 0
    timeout 5 scancel --me 2>/dev/null
    sleep 0.1
  done
}

if [ "$MODE" = plain ] && [ -n "$(ours $(pids slurmctld))" ]; then cancel_jobs; fi  # while the daemons still can
stop TERM 5 $(pids slurmctld)  # before the nodes: without them it is slow to stop
if [ "$MODE" = plain ]; then
  stop TERM 5 $(pids 'slurmd-*')
  stop KILL 2 $(steps)
else
  stop KILL 5 $(pids 'node-*') $(first_processes)
fi
stop TERM 5 $(pids munged)

if [ "$MODE" = net ]; then
  for name in $(ip netns list | awk -v prefix="$BRIDGE-" 'index($1, prefix) == 1 { print $1 }'); do
    ip link del "$BRIDGE${name#"$BRIDGE-"}" 2>/dev/null  # by itself: `netns del` frees its name late
    ip netns del "$name"
  done
  ip link del "$BRIDGE" 2>/dev/null
fi
if [ -n "$FREEZER" ]; then
  for dir in "$FREEZER/$BRIDGE"-n*; do
    [ -d "$dir" ] && find "$dir" -depth -type d -exec rmdir {} + 2>/dev/null
  done
  umount "$FREEZER" || umount --lazy "$FREEZER"
fi
rm -rf "$LAB"/pids "$LAB"/env.sh
[ "${KEEP:-0}" = 1 ] || rm -rf --one-file-system "$LAB"
echo "cluster down"
