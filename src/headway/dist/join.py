"""Joins a group of ranks: `init` detects the launcher, finds the other ranks, and makes torch's process group.

From then on a failure of any rank ends all of them, with the first cause on the screen and in the run directory.
"""

from __future__ import annotations

import atexit
import math
import os
import resource
import secrets
import socket
import time
from datetime import timedelta
from functools import partial
from ipaddress import ip_address
from pathlib import Path

import psutil
import torch
import torch.distributed as c10d

from headway.dist.control.hub import Hub
from headway.dist.control.peer import Peer, connect_to_hub
from headway.dist.device import choose_device
from headway.dist.environment import LaunchEnvironment, check_device, detect
from headway.dist.failure.capture import HEARTBEAT
from headway.dist.failure.exit_deadline import (
    EXIT_CODE,
    HUNG_CODE,
    end_daemonic_children,
    exit_within,
    limit_normal_exit,
)
from headway.dist.group import (
    RankGroup,
    World,
    abandon,
    hook_exceptions,
    is_initialized,
    keep_hook,
    leave_current,
    own_group,
    set_current,
    world,
)
from headway.dist.rendezvous import (
    LOOPBACK,
    FileRendezvous,
    HubAddress,
    Rendezvous,
    StoreRendezvous,
    check_loopback,
    file_rendezvous,
    interface_toward,
    listen,
    own_address,
)
from headway.dist.roster import RankInfo, RankPlacement, place_ranks
from headway.dist.signed_store import SignedStore
from headway.dist.topology import machine
from headway.dist.topology.nccl import nccl_settings, read_conf
from headway.errors import RankFailure, UsageError
from headway.system import running_clock
from headway.system.environment import HEARTBEAT as HEARTBEAT_VARIABLE, directory, watchdog_s
from headway.system.limits import raise_open_files
from headway.system.log import install_handler, logger
from headway.system.running_clock import RUNNING_CLOCK
from headway.system.text import shorten_list

_STEP_TIMEOUT_S = 1800.0
_COLLECTIVE_FACTOR = 10.0
_OTHER_FILES = 128
"""open files of a rank besides its connections: libraries, logs, pipes"""
_LEAVE_TIMEOUT_S = 2.0
"""how long a rank that leaves waits for the others to leave, too"""
_LOOK_S = 0.5
"""how often rank 0 looks how long it has waited"""
_OVERDUE_S = 2.0
"""how much longer rank 0 waits for a rank that ends itself because its own exit takes too long"""


def init(
    *, device: str = "auto", setup_timeout: float = 300.0, step_timeout: float = _STEP_TIMEOUT_S
) -> World:
    """Joins the ranks that were launched together, under any launcher, and returns this rank's place.

    Works under `headway run`, torchrun, `srun`, `mpirun`, and without a launcher. A second call returns the same world.

    `device` is "auto", "cpu", "cuda" or "mps". `setup_timeout` is how long, in seconds, ranks wait for each other to
    join. `step_timeout` is how long they may make no progress afterwards, in a collective or elsewhere, before the run
    ends with a report that names the rank that holds up the others. HEADWAY_WATCHDOG overrides it; 0 switches the
    check off, and leaves the timeout to the collectives.

    >>> world = headway.init()
    >>> model.to(world.device)
    """
    if is_initialized():
        return world()
    if c10d.is_initialized():
        raise UsageError(
            "torch.distributed is initialized already: call headway.init() instead of init_process_group()"
        )
    install_handler()
    keep_hook()
    hook_exceptions()
    check_device(device)
    _check_seconds(setup_timeout=setup_timeout, step_timeout=step_timeout)
    period_s = watchdog_s(step_timeout)
    group = RankGroup(detect())
    set_current(group)
    if period_s:
        running_clock.start()
    HEARTBEAT.watch(period_s, rank=group.launch.rank, directory=directory(HEARTBEAT_VARIABLE))
    try:
        placement = _rendezvous(group, setup_timeout)
        group.world = _make_world(group, placement, device)
        _check_gpus_differ(group, placement)
        # collectives have ten times the time: the hang report, which says more than their timeout, comes first, and
        # their clock does not leave out the time in which a job is suspended
        _make_process_group(group, _COLLECTIVE_FACTOR * period_s or step_timeout or _STEP_TIMEOUT_S)
    except BaseException:
        if group.peer is None:  # no other rank has seen this one; else the exception hook informs them
            abandon(group)
        raise
    atexit.unregister(_end_children)
    atexit.register(_end_children, os.getpid())
    atexit.register(leave)  # runs first
    EXIT_CODE.watch(partial(_leave_by_os_exit, period_s))
    if period_s:
        why = f"the script of rank {group.launch.rank} has ended"
        limit_normal_exit(why, period_s, partial(_others_are_late, group, period_s))
    if group.launch.rank == 0:
        logger.info("launched by: %s", _launched_by(group.world, placement))
    return group.world


def _check_seconds(**given: float) -> None:
    for name, seconds in given.items():
        if not isinstance(seconds, int | float) or not 0 <= seconds < math.inf:
            raise UsageError(f"{name}={seconds!r:.80} is not a valid time: give seconds, such as 600")


def _launched_by(world: World, placement: RankPlacement) -> str:
    if world.launcher == "none":
        return f"python alone, 1 process on {world.device}"
    return f"{world.launcher}, {placement.layout} on {world.device.type}"


def _rendezvous(group: RankGroup, timeout: float) -> RankPlacement:
    """Finds the other ranks. Afterwards the group has a store and a connection to the hub."""
    launch = group.launch
    me = RankInfo(
        rank=launch.rank,
        host=socket.gethostname(),
        node=launch.node,
        pid=os.getpid(),
        local_rank=launch.local_rank,
        visible_gpus=os.environ.get("CUDA_VISIBLE_DEVICES"),
    )
    if launch.world_size == 1:
        return place_ranks([me])[0]
    if launch.local_world_size == launch.world_size:
        check_loopback()
    _allow_open_files(launch)
    rendezvous: Rendezvous
    if launch.store_address is None:
        rendezvous = file_rendezvous(launch)
        rendezvous.check()
    else:
        group.store = _launchers_store(launch, timeout)
        rendezvous = StoreRendezvous(group.store, one_node=launch.local_world_size == launch.world_size)
    if launch.rank == 0:
        _open_hub(group, rendezvous, timeout)
    try:
        group.peer, welcome, host = connect_to_hub(rendezvous, me, timeout, HEARTBEAT)
    except RankFailure as error:
        absent = group.hub.missing() if group.hub else []
        if absent:
            raise RankFailure(
                f"{len(absent)} of {launch.world_size} ranks did not join within {timeout:.0f} s: "
                f"{shorten_list(absent)}; look at the start of their output, or raise setup_timeout"
            ) from error
        raise
    finally:
        if group.hub:
            rendezvous.close()
    group.root_host = host
    _follow_hub(group, group.peer, RankInfo(**welcome["root"]))
    if isinstance(rendezvous, FileRendezvous):
        _export_address(group, host, int(welcome["store_port"]))
        if launch.rank != 0:
            group.store = c10d.TCPStore(host, int(welcome["store_port"]), timeout=timedelta(seconds=timeout))
    group.key = group.peer.derive_key("values between ranks")
    if isinstance(rendezvous, StoreRendezvous):
        # torchrun keeps its store when it restarts the ranks: keys of earlier ranks must not be read
        name = group.peer.derive_key("name of the launch").hex()[:16]
        group.store = c10d.PrefixStore(f"headway/{name}", group.store)
    group.store = SignedStore(group.store, group.key)
    return RankPlacement(**welcome["placement"])


def _follow_hub(group: RankGroup, peer: Peer, root: RankInfo) -> None:
    """Starts to follow the hub: from now on its messages, or their absence, can end this rank."""
    handler = group.failure_handler
    handler.peer, handler.root = peer, root
    peer.listen(handler.on_abort, handler.on_hub_lost, handler.on_hub_silent)


def _launchers_store(launch: LaunchEnvironment, timeout: float) -> c10d.Store:
    """Returns the store behind MASTER_ADDR: torchrun's own, or one that rank 0 opens where the user chose."""
    host, _, port = (launch.store_address or "").rpartition(":")
    address = own_address(host)
    is_torchruns = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    # many hosts resolve their own name to the loopback, which is not the address that other hosts need
    elsewhere = address in LOOPBACK and host not in (*LOOPBACK, "localhost")
    elsewhere &= launch.local_world_size != launch.world_size
    if launch.rank == 0 and not is_torchruns and address and not elsewhere and port.isdigit():
        # torch would listen on all networks of this host
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            server = socket.create_server((address, int(port)), family=family, backlog=4096)
        except OSError as error:
            raise UsageError(
                f"MASTER_PORT={port} cannot be opened on {host} ({os.strerror(error.errno or 0)}): "
                f"unset MASTER_ADDR and MASTER_PORT, or choose another port"
            ) from error
        return c10d.TCPStore(
            address,
            int(port),
            is_master=True,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
            master_listen_fd=server.detach(),
        )
    found = c10d.rendezvous("env://", launch.rank, launch.world_size, timeout=timedelta(seconds=timeout))
    try:
        store: c10d.Store = next(found)[0]
    except (c10d.DistNetworkError, c10d.DistStoreError) as error:
        why = str(error).partition(". ")[0]  # the rest is a stack trace from torch
        raise RankFailure(
            f"the ranks cannot meet at {launch.store_address} (MASTER_ADDR, MASTER_PORT; {why}): "
            f"check that rank 0 was started, and that its port is free and can be reached"
        ) from error
    return store


def _open_hub(group: RankGroup, rendezvous: Rendezvous, timeout: float) -> None:
    """Starts the hub on rank 0 and publishes its address. The kernel picks its port, and that of the store."""
    listener, hosts = listen(group.launch)
    key = secrets.token_bytes(32)
    welcome = {}
    if isinstance(rendezvous, FileRendezvous):
        server, _ = listen(group.launch)
        address, port = server.getsockname()[:2]
        welcome["store_port"] = port
        group.store = c10d.TCPStore(
            # a port that is open at one address is not open at the loopback
            LOOPBACK[0] if ip_address(address).is_unspecified else address,
            port,
            is_master=True,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
            master_listen_fd=server.detach(),
        )
    group.hub = Hub(
        listener,
        key,
        group.launch.world_size,
        welcome=welcome,
        on_first_failure=group.failure_handler.on_first_failure,
        on_all_down=group.failure_handler.on_all_down,
        heartbeat=HEARTBEAT,
    )
    group.hub.start()
    rendezvous.publish(HubAddress(hosts=hosts, port=listener.getsockname()[1], key=key))


def _allow_open_files(launch: LaunchEnvironment) -> None:
    """Raises the limit of this process: gloo keeps a connection per rank; on rank 0, so do the hub and the store."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = (1 if launch.rank else 3) * launch.world_size + _OTHER_FILES
    if hard != resource.RLIM_INFINITY and hard < needed and launch.rank == 0:
        # with NCCL, the other ranks may need fewer
        raise UsageError(
            f"rank 0 needs {needed:,} open files for {launch.world_size:,} ranks, and the limit is {hard:,} "
            f"(ulimit -Hn); raise it in the job script or ask your administrators"
        )
    raise_open_files(needed)


def _export_address(group: RankGroup, host: str, port: int) -> None:
    group.export("MASTER_ADDR", host)
    group.export("MASTER_PORT", str(port))


def _make_world(group: RankGroup, placement: RankPlacement, device: str) -> World:
    """Chooses this rank's device, and exports its place in the variables that torchrun uses."""
    launch = group.launch
    chosen = choose_device(device, placement, launch.world_size)
    for name, value in {
        "RANK": launch.rank,
        "WORLD_SIZE": launch.world_size,
        "LOCAL_RANK": placement.local_rank,
        "LOCAL_WORLD_SIZE": placement.local_world_size,
        "GROUP_RANK": placement.node_rank,
        "GROUP_WORLD_SIZE": placement.nodes,
    }.items():
        group.export(name, str(value))
    if placement.nodes == 1:
        # without this gloo resolves the host's name, which fails on many laptops and in containers
        group.export("GLOO_SOCKET_IFNAME", _loopback(), override=False)
    if launch.world_size > 1 and (placement.nodes > 1 or chosen.type == "cuda"):
        _tune_network(group, placement.nodes)
    return World(
        rank=launch.rank,
        world_size=launch.world_size,
        local_rank=placement.local_rank,
        local_world_size=placement.local_world_size,
        node_rank=placement.node_rank,
        nodes=placement.nodes,
        host=socket.gethostname(),
        launcher=launch.launcher,
        device=chosen,
    )


def _check_gpus_differ(group: RankGroup, placement: RankPlacement) -> None:
    """Raises if two ranks share a GPU, which would fail much later and deep inside NCCL."""
    world = group.world
    assert world is not None
    if world.device.type != "cuda" or world.local_world_size == 1 or "NCCL_HOSTID" in os.environ:
        return  # NCCL_HOSTID is set to share a GPU on purpose
    own = str(torch.cuda.get_device_properties(world.device).uuid)
    group.store.set(f"headway/gpu/{world.rank}", own)
    earlier = placement.ranks_on_node[: placement.ranks_on_node.index(world.rank)]
    for other in earlier:
        if group.store.get(f"headway/gpu/{other}").decode() == own:
            raise UsageError(
                f"ranks {other} and {world.rank} on {world.host} have the same GPU ({world.device}); start at most one "
                f"rank per GPU, or use device='cpu'"
            )


def _tune_network(group: RankGroup, nodes: int) -> None:
    """Sets the few network variables that this machine needs and that are not set, and logs them with reasons."""
    settings = nccl_settings(
        machine.detect(),
        nodes,
        {**read_conf(os.environ, Path("/")), **os.environ},
        toward_root=interface_toward(group.root_host) if nodes > 1 else None,
    )
    for setting in settings:
        if setting.value is not None:
            group.export(setting.name, setting.value, override=False)
        if group.launch.rank == 0:
            logger.info("%s", setting)


def _loopback() -> str:
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == "127.0.0.1" for address in addresses):
            return name
    return "lo"


def _make_process_group(group: RankGroup, step_timeout: float) -> None:
    world = group.world
    assert world is not None
    cuda = world.device.type == "cuda"
    c10d.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        store=c10d.PrefixStore("headway/c10d", group.store),
        rank=world.rank,
        world_size=world.world_size,
        timeout=timedelta(seconds=step_timeout),
        device_id=world.device if cuda else None,
    )
    hook_exceptions()


def _end_children(rank_pid: int) -> None:
    """Ends the data workers of a rank at its exit; a forked child leaves those of its rank alone."""
    if os.getpid() == rank_pid:
        end_daemonic_children()


def _leave_by_os_exit(limit_s: float) -> None:
    """Leaves the group before `os._exit(0)`, if training was over and only the rest of the script remained.

    During training, `os._exit` counts as the loss of a rank, and ends the others.
    """
    group = own_group()
    if group is not None and group.trained and not group.raised:
        if limit_s:
            exit_within(limit_s, HUNG_CODE)
        leave()


def _others_are_late(group: RankGroup, limit_s: float) -> bool:
    """Whether rank 0 is only waiting for others to leave. If they do not, the hub names them and ends all ranks."""
    if group.hub is None or group.peer is None or not group.hub.is_awaited or group.hub.all_left.is_set():
        return False
    if not group.hub.all_left.wait(_OVERDUE_S):
        group.peer.report_overdue(limit_s, "the script of rank 0 has ended")
    return True


def _wait_for_others(group: RankGroup, limit_s: float) -> None:
    """Waits on rank 0 until all others have left. After `limit_s`, the hub names those that have not and ends all."""
    assert group.hub is not None and group.peer is not None
    began = time.monotonic()
    while not group.hub.all_left.wait(_LOOK_S):
        if limit_s and RUNNING_CLOCK.since(began) > limit_s + _OVERDUE_S:
            group.peer.report_overdue(limit_s, "rank 0 has left")
            group.hub.all_left.wait()


def leave() -> None:
    """Leaves the group and restores what `init` set. Called at exit; rank 0 waits until all others have left.

    hw.init()
    try:
        train()
    finally:
        hw.dist.leave()
    """
    group = own_group()
    if group is None:
        return
    limit_s = HEARTBEAT.period
    HEARTBEAT.stop()
    if group.hub is not None:
        group.hub.is_awaited = True
    if group.peer is not None:
        group.peer.leave(_LEAVE_TIMEOUT_S)
    if c10d.is_initialized():
        c10d.destroy_process_group()
    if group.hub is not None:
        _wait_for_others(group, limit_s)
    if group.peer is not None:
        group.peer.close()
    group.call_at_clean_exit()
    running_clock.stop()
    EXIT_CODE.restore()
    leave_current(group)
    atexit.unregister(leave)
