#!/usr/bin/env bash
# Run a command (a shell, pytest ...) in a user namespace where the net mode of up.sh works without root.
# The caller's uid is kept, with all capabilities inside; /run is private, as `ip netns` writes there.
exec unshare --user --map-current-user --keep-caps --net --mount --pid --fork --mount-proc bash -c '
  mount -t tmpfs tmpfs /run && mkdir -p /run/netns && ip link set lo up && exec "$@"' rootless "$@"
