#!/usr/bin/env bash
# Bring up a real Slurm cluster of several virtual nodes on this one machine, without systemd and without the network outside.
#
# Settings (environment):
#   LAB        directory of everything: configuration, key, state, logs, pid files      ${TMPDIR:-/tmp}/hw-lab
#              (keep it short: sockets live in it, and their paths end at 108 characters)
#   NODES      number of nodes, named n1 n2 ...                                         4
#   CPUS       CPUs each node claims; may exceed the hardware                           4
#   GPUS       fake GPUs each node claims, 0 for none                                   2
#   PORT       slurmctld listens on PORT, the slurmd of node i on PORT+i                17000
#              (clusters that live at the same time: ports 100 apart, a LAB for each)
#   MODE       net    a node has its own host name, PID space, /dev/shm and network     the first that is allowed
#              ns     the same, but all nodes share the machine's network
#              plain  nodes differ in name and port only; any user may
#              (net and ns need root, or rootless.sh)
#   PROCTRACK  linuxproc  a signal to a step reaches all its processes                  linuxproc
#              cgroup     it reaches the task leaders only, as on most clusters (needs net or ns, and root)
#   GRACE      seconds a preempted job of partition "low" is given                      5
#   KILLWAIT   seconds from TERM to KILL                                                2
#   PATIENCE   seconds in which a node must answer; it is missed after 3 to 4 times that 10
#
# Afterwards:  . $LAB/env.sh   and then sinfo, srun, sbatch ...;  node.sh for single nodes;  down.sh ends it all.
set -euo pipefail
HERE=$(cd "$(dirname "$0")" && pwd)
PATH=$PATH:/usr/sbin:/sbin
LAB=${LAB:-${TMPDIR:-/tmp}/hw-lab} NODES=${NODES:-4} CPUS=${CPUS:-4} GPUS=${GPUS:-2} PORT=${PORT:-17000}
MODE=${MODE:-} PROCTRACK=${PROCTRACK:-linuxproc} GRACE=${GRACE:-5} KILLWAIT=${KILLWAIT:-2} PATIENCE=${PATIENCE:-10}
BRIDGE=hw$PORT                     # also the prefix of the names of network namespaces, links and cgroups
USER_NAME=$(id -un)
HOST=$(uname -n) HOST=${HOST%%.*}  # the short name, as slurmctld sees it; `hostname -s` fails where the name does not resolve

die() { echo "up.sh: $*" >&2; exit 1; }

best_mode() {
  unshare --uts --mount --ipc --pid --fork --mount-proc true 2>/dev/null || { echo plain; return; }
  if ip link add "${BRIDGE}t" type bridge 2>/dev/null; then ip link del "${BRIDGE}t"; echo net; else echo ns; fi
}

address() {  # of node i
  if [ "$MODE" = net ]; then echo "$NET.$1"; else echo "127.0.0.$((10 + $1))"; fi
}

write_hosts() {  # becomes /etc/hosts of each node
  printf '%s\n' "127.0.0.1 localhost" "::1 localhost" "::ffff:127.0.0.1 localhost" "$CONTROLLER $HOST"
  for i in $(seq "$NODES"); do
    printf '%s\n' "$(address "$i") n$i" "::ffff:$(address "$i") n$i"  # torch looks names up backwards, by the mapped address
  done
}

make_network() {  # a bridge, and for each node a network namespace whose eth0 is plugged into it
  ip link add "$BRIDGE" type bridge
  ip addr add "$CONTROLLER/24" dev "$BRIDGE"
  ip link set "$BRIDGE" up
  for i in $(seq "$NODES"); do
    ip netns add "$BRIDGE-n$i"
    ip link add "${BRIDGE}n$i" type veth peer name eth0 netns "$BRIDGE-n$i"
    ip link set "${BRIDGE}n$i" master "$BRIDGE" up
    ip -n "$BRIDGE-n$i" addr add "$(address "$i")/24" dev eth0
    ip -n "$BRIDGE-n$i" link set lo up
    ip -n "$BRIDGE-n$i" link set eth0 up
  done
}

start_munge() {  # with a key and a socket of its own
  (umask 077; head -c 128 /dev/urandom > munge/munge.key)
  # --force: in a user namespace the directories above LAB seem to belong to nobody, which munged would refuse
  munged --force --num-threads=2 --key-file="$LAB/munge/munge.key" --socket="$LAB/munge/munge.socket" \
    --pid-file="$LAB/pids/munged.pid" --log-file="$LAB/log/munged.log" --seed-file="$LAB/munge/seed" >> log/munged.out 2>&1
}

write_gres() {  # Slurm wants character devices whose names end in a number: links to /dev/null will do
  for g in $(seq 0 $((GPUS - 1))); do ln -sfn /dev/null "dev/gpu$g"; done
  [ "$GPUS" = 0 ] || echo "NodeName=n[1-$NODES] Name=gpu File=$LAB/dev/gpu[0-$((GPUS - 1))]"
}

write_cgroup() {
  printf '%s\n' CgroupPlugin=cgroup/v1 "CgroupMountpoint=$LAB/cgroup" ConstrainCores=no ConstrainDevices=no ConstrainRAMSpace=no
}

write_slurm() {
  cat << CONF
ClusterName=headway
SlurmctldHost=$HOST($CONTROLLER)
SlurmctldPort=$PORT
SlurmUser=$USER_NAME
SlurmdUser=$USER_NAME
AuthType=auth/munge
CredType=cred/munge
# cred_expire is also how long a requeued job waits. Below 5 it means the default, 120; and it must exceed KillWait + 2,
# or else a left-over srun of the old run kills the step of the same number of the new run.
AuthInfo=socket=$LAB/munge/munge.socket,cred_expire=$((KILLWAIT > 2 ? KILLWAIT + 3 : 5))
StateSaveLocation=$LAB/state
SlurmdSpoolDir=$LAB/spool-%n
# one for each node: PMIx keeps its sockets there
TmpFS=$LAB/tmp-%n
SlurmctldPidFile=$LAB/pids/slurmctld.pid
SlurmdPidFile=$LAB/pids/slurmd-%n.pid
SlurmctldLogFile=$LAB/log/slurmctld.log
SlurmdLogFile=$LAB/log/slurmd-%n.log
SlurmctldDebug=verbose
SlurmdDebug=verbose
ProctrackType=proctrack/$PROCTRACK
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc=$LAB/log/jobcomp.log
MpiDefault=none
# nodes may claim more than the hardware has, are missed soon, and come back by themselves
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=$PATIENCE
MessageTimeout=$PATIENCE
SlurmctldTimeout=10
InactiveLimit=0
KillWait=$KILLWAIT
UnkillableStepTimeout=30
WaitTime=0
# how long the state of a job that has ended can be asked for: tests may come back to one late
MinJobAge=3600
# scheduling, requeue, preemption
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,sched_min_interval=10000,bf_interval=1,batch_sched_delay=0
PriorityType=priority/basic
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
JobRequeue=1
JobFileAppend=1
GresTypes=gpu
NodeName=n[1-$NODES] NodeHostname=n[1-$NODES] NodeAddr=$ADDRESSES Port=[$((PORT + 1))-$((PORT + NODES))] CPUs=$CPUS RealMemory=4000 Gres=gpu:$GPUS State=UNKNOWN
PartitionName=low  Nodes=ALL Default=YES PriorityTier=1  PreemptMode=REQUEUE GraceTime=$GRACE DefaultTime=10 MaxTime=60 State=UP
PartitionName=high Nodes=ALL Default=NO  PriorityTier=10 PreemptMode=OFF DefaultTime=10 MaxTime=60 State=UP
CONF
}

wait_for_nodes() {
  local limit=$((SECONDS + 90))  # a busy machine takes its time
  while [ $SECONDS -lt $limit ]; do
    [ "$(timeout 5 sinfo -h -p low -t idle -o %D 2>/dev/null)" = "$NODES" ] && return 0
    sleep 0.1
  done
  return 1
}

[ -n "$MODE" ] || MODE=$(best_mode)
case $MODE in
  net) NET=10.213.$((PORT / 100 % 250)) CONTROLLER=$NET.254 ADDRESSES="$NET.[1-$NODES]" ;;
  ns | plain) CONTROLLER=127.0.0.1 ADDRESSES="127.0.0.[11-$((10 + NODES))]" ;;
  *) die "MODE is net, ns or plain, not '$MODE'" ;;
esac
case $PROCTRACK in
  linuxproc) FREEZER= ;;
  cgroup) FREEZER=$LAB/cgroup/freezer; [ "$MODE" != plain ] || die "PROCTRACK=cgroup needs MODE net or ns" ;;
  *) die "PROCTRACK is linuxproc or cgroup, not '$PROCTRACK'" ;;
esac
[ ${#LAB} -le 60 ] || die "LAB is too long for the sockets in it: $LAB"
[ ! -e "$LAB/env.sh" ] || die "already up, or not torn down: $LAB"

umask 022
mkdir -p "$LAB"/{munge,state,log,pids,dev}
cd "$LAB"
# what node.sh and down.sh must know; written first, so that a bring-up that fails half-way can be torn down
printf '%s\n' "export LAB=$LAB SLURM_CONF=$LAB/slurm.conf" "MODE=$MODE BRIDGE=$BRIDGE FREEZER=$FREEZER" > env.sh
. ./env.sh
write_hosts > hosts
write_gres > gres.conf
write_slurm > slurm.conf
if [ "$MODE" = net ]; then make_network; fi
if [ -n "$FREEZER" ]; then
  # a mount of our own: machines with cgroup v2 have none, yet let one be made
  mkdir -p "$FREEZER"
  mount -t cgroup -o freezer none "$FREEZER"
  write_cgroup > cgroup.conf
fi
start_munge
slurmctld -c >> log/slurmctld.out 2>&1
for i in $(seq "$NODES"); do "$HERE/node.sh" start "n$i"; done
wait_for_nodes || { timeout 5 sinfo -N -l >&2 || true; die "the nodes did not come up; see $LAB/log"; }
echo "cluster up: $NODES nodes ($MODE, $PROCTRACK)"
