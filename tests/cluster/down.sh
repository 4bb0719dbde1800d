#!/usr/bin/env bash
# Tear down the cluster in LAB (${TMPDIR:-/tmp}/hw-lab unless set), however far up.sh got. Ends only processes that are named
# in LAB's pid files and name LAB themselves: a stale pid file can never hit a stranger.
# KEEP=1 leaves the directory, and so the logs, in place.
set -uo pipefail
PATH=$PATH:/usr/sbin:/sbin
LAB=${LAB:-${TMPDIR:-/tmp}/hw-lab}
[ -e "$LAB/env.sh" ] || { echo "nothing at $LAB"; exit 0; }
. "$LAB/env.sh"

alive() {  # ours, and no zombie: an init that polls may take seconds to reap one
  local state
  [ -r "/proc/$1/stat" ] && cat "/proc/$1/environ" "/proc/$1/cmdline" 2>/dev/null | grep -qzF "$LAB/" || return 1
  state=$(sed 's/.*) //; s/ .*//' "/proc/$1/stat" 2>/dev/null)
  [ -n "$state" ] && [ "$state" != Z ]
}

any_alive() { local pid; for pid in "$@"; do alive "$pid" && return 0; done; return 1; }

signal() { local name=$1 pid; shift; for pid in "$@"; do alive "$pid" && kill "-$name" "$pid" 2>/dev/null; done; }

stop() {  # SIGNAL SECONDS PID...: signal them all, wait for all, KILL what is left
  local name=$1 seconds=$2
  shift 2
  signal "$name" "$@"
  for _ in $(seq $((seconds * 20))); do any_alive "$@" || return 0; sleep 0.05; done
  signal KILL "$@"
  sleep 0.1
}

pids() { cat "$LAB"/pids/$1.pid 2>/dev/null; }  # $1 may be a pattern

steps() {  # plain mode has no PID namespace that would end the steps with their node
  local dir
  for dir in /proc/[0-9]*; do
    [ "$(cat "$dir/comm" 2>/dev/null)" = slurmstepd ] && alive "${dir#/proc/}" && echo "${dir#/proc/}"
  done
}

cancel_jobs() {
  for _ in $(seq 100); do
    [ -n "$(timeout 5 squeue -h 2>/dev/null)" ] || return 0
    timeout 5 scancel --me 2>/dev/null
    sleep 0.1
  done
}

if [ "$MODE" = plain ] && any_alive $(pids slurmctld); then cancel_jobs; fi  # while the daemons still can
stop TERM 5 $(pids slurmctld)                                                # first: it is slow to stop once its nodes are gone
if [ "$MODE" = plain ]; then
  stop TERM 5 $(pids 'slurmd-*')
  stop TERM 2 $(steps)
else
  stop KILL 5 $(pids 'node-*')                                               # a node's whole PID namespace goes with it
fi
stop TERM 5 $(pids munged)

if [ "$MODE" = net ]; then
  for name in $(ip netns list | awk -v prefix="$BRIDGE-" 'index($1, prefix) == 1 { print $1 }'); do
    ip link del "$BRIDGE${name#"$BRIDGE-"}" 2>/dev/null                      # itself too: `netns del` frees its name late
    ip netns del "$name"
  done
  ip link del "$BRIDGE" 2>/dev/null
fi
if [ -n "$FREEZER" ]; then
  for dir in "$FREEZER/$BRIDGE"-n*; do
    [ -d "$dir" ] && find "$dir" -depth -type d -exec rmdir {} + 2>/dev/null
  done
fi
rm -rf "$LAB"/pids "$LAB"/env.sh
[ "${KEEP:-0}" = 1 ] || rm -rf "$LAB"
echo "cluster down"
