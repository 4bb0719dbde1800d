#!/usr/bin/env bash
# Install what the cluster, MPI and browser tests need and this machine lacks: Slurm, munge, Open MPI, Chromium and a few
# system tools.
# Says nothing when all is there. Where it may not install, it says in one line what will be skipped, and is content.
set -euo pipefail
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin  # the system's: a virtual environment has an mpirun too

missing() {  # the packages that are not here, judged by what they bring
  local package command
  while read -r package command; do
    type -P "$command" > /dev/null || echo "$package"
  done << 'END'
slurm-wlm slurmctld
slurm-wlm slurmd
slurm-wlm srun
munge munged
openmpi-bin mpirun.openmpi
iproute2 ip
util-linux unshare
util-linux nsenter
procps pgrep
strace strace
chromium chromium
END
  compgen -G '/usr/lib*/*/pmix2/lib/libpmix.so' > /dev/null || echo libpmix-dev  # Slurm loads it for srun --mpi=pmix
}

skip() { echo "install-services: $1; tests that need ${packages[*]} will be skipped"; exit 0; }

mapfile -t packages < <(missing | sort -u)
[ ${#packages[@]} -gt 0 ] || exit 0
type -P apt-get > /dev/null || skip "no apt-get"
as_root=()
if [ "$(id -u)" != 0 ]; then
  sudo -n true 2> /dev/null || skip "neither root nor sudo without a password"
  as_root=(sudo -n)
fi

echo "install-services: installing ${packages[*]}"
apt=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=120)
log=$(mktemp)
trap 'rm -f "$log"' EXIT
if ! { "${apt[@]}" update && "${apt[@]}" install -y --no-install-recommends "${packages[@]}"; } > "$log" 2>&1; then
  cat "$log" >&2
  skip "apt-get failed"
fi
