#!/usr/bin/env bash
# One node of the cluster in LAB (${TMPDIR:-/tmp}/hw-lab unless set):
#   node.sh start NAME           start it, or start it again after a crash
#   node.sh crash NAME           kill everything on it at once, as a power cut would     (net, ns)
#   node.sh slurmd NAME SIGNAL   signal its slurmd only; its jobs live on
#   node.sh cut|mend NAME        take its network away; give it back                     (net)
#   node.sh enter NAME COMMAND   run a command on it, outside Slurm                      (net, ns)
set -euo pipefail
PATH=$PATH:/usr/sbin:/sbin
ACTION=$1 NAME=$2
shift 2
. "${LAB:-${TMPDIR:-/tmp}/hw-lab}/env.sh"
cd "$LAB"
PID_FILE=pids/node-$NAME.pid

children() { cat "/proc/$1/task/$1/children"; }
first_process() { children "$(cat "$PID_FILE")" | cut -d' ' -f1; }  # the node's PID 1, as seen from outside

start() {
  mkdir -p "spool-$NAME" "tmp-$NAME"
  if [ "$MODE" = plain ]; then exec slurmd -N "$NAME" >> "log/node-$NAME.out" 2>&1; fi
  local network=() cgroup=
  if [ "$MODE" = net ]; then network=(nsenter "--net=/run/netns/$BRIDGE-$NAME"); fi
  if [ -n "$FREEZER" ]; then cgroup=$FREEZER/$BRIDGE-$NAME; mkdir -p "$cgroup"; fi
  # First into the node's cgroup, so that its cgroup namespace begins there; then into namespaces of its own.
  # Its PID 1 is a bash that reaps orphans and outlives slurmd.
  setsid "${network[@]}" bash -c '
      [ -z "$1" ] || echo $$ > "$1/cgroup.procs"
      shift
      exec "$@"' enter "$cgroup" \
    unshare --uts --mount --ipc --cgroup --pid --fork --mount-proc --kill-child bash -c '
      [ -z "$3" ] || mount --bind "$3" "$4"
      hostname "$1"
      export HOSTNAME=$1
      mount --bind "$2/hosts" /etc/hosts
      mount -t tmpfs -o size=2g tmpfs /dev/shm
      slurmd -D -N "$1" &
      while :; do wait -n 2>/dev/null || sleep 1; done' node "$NAME" "$LAB" "$cgroup" "$FREEZER" \
    < /dev/null >> "log/node-$NAME.out" 2>&1 &
  echo $! > "$PID_FILE"
}

crash() {
  local first
  first=$(first_process)
  kill -KILL "$(cat "$PID_FILE")" "$first"
  rm "$PID_FILE"
  while grep -qs '^State:.[^ZX]' "/proc/$first/status"; do sleep 0.02; done  # with PID 1 all others have gone
}

signal_slurmd() {
  local pid
  if [ "$MODE" = plain ]; then kill "-$1" "$(cat "pids/slurmd-$NAME.pid")"; return; fi
  for pid in $(children "$(first_process)"); do
    if [ "$(cat "/proc/$pid/comm")" = slurmd ]; then kill "-$1" "$pid"; fi
  done
}

case $ACTION in
  start) start ;;
  crash) crash ;;
  slurmd) signal_slurmd "${1:-TERM}" ;;
  cut) ip link set "$BRIDGE$NAME" down ;;
  mend) ip link set "$BRIDGE$NAME" up ;;
  enter) exec nsenter -t "$(first_process)" --uts --mount --ipc --cgroup --net --pid "$@" ;;  # -a fails in a user namespace
  *) echo "node.sh: unknown action '$ACTION'" >&2; exit 2 ;;
esac
