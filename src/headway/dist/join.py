"""Joining: from a lone process to one of a group that lives and dies together.

`init` finds out who launched us, meets the other ranks, and makes torch's process group. From then on a failure of
any rank ends all of them, with the first cause on the screen and in the run directory.
"""

from __future__ import annotations

import atexit
import math
import os
import secrets
import socket
import sys
from datetime import timedelta
from pathlib import Path

import psutil
import torch
import torch.distributed as c10d

from headway.dist.control.hub import Hub
from headway.dist.control.peer import connect_to_hub
from headway.dist.device import check_kind, choose_device
from headway.dist.environment import LaunchEnvironment, detect
from headway.dist.failure.capture import HEARTBEAT
from headway.dist.group import (
    RankGroup,
    World,
    enter,
    exit_group,
    forget,
    hook_exceptions,
    is_initialized,
    mine,
    world,
)
from headway.dist.rendezvous import HubAddress, FileRendezvous, Rendezvous, StoreRendezvous, file_rendezvous, listen
from headway.dist.roster import RankInfo, RankPlacement, seats
from headway.dist.topology import machine
from headway.dist.topology.nccl import nccl_settings, read_conf
from headway.errors import RankFailure, UsageError
from headway.system.log import install_handler

_LEAVE_TOGETHER = 2.0
"""seconds a rank waits at its end for the others to end, too"""


def init(*, device: str = "auto", setup_timeout: float = 300.0, step_timeout: float = 1800.0) -> World:
    """Joins the ranks that were launched together, whoever launched them, and returns this rank's place.

    Works under `headway run`, torchrun, `srun`, `mpirun` and nothing at all. Calling it again returns the same world.

    `device` is "auto", "cpu", "cuda" or "mps". `setup_timeout` bounds how long ranks wait for each other to come;
    `step_timeout` how long they may stand still afterwards, in a collective or elsewhere, before a report says who
    holds up whom and the run ends. HEADWAY_WATCHDOG=seconds sets it from outside; 0 leaves it to the collectives.

    >>> world = headway.init()
    >>> model.to(world.device)
    """
    if is_initialized():
        return world()
    if c10d.is_initialized():
        raise UsageError(
            "torch.distributed is initialised already: call headway.init() instead of init_process_group()"
        )
    install_handler()
    hook_exceptions()
    check_kind(device)
    period = _period(step_timeout)
    group = RankGroup(detect())
    enter(group)
    pulse = os.environ.get("HEADWAY_HEARTBEAT")
    HEARTBEAT.watch(period, rank=group.place.rank, folder=Path(pulse) if pulse else None)
    try:
        found = _meet(group, setup_timeout)
        group.world = _sit_down(group, found, device)
        _check_gpus_differ(group, found)
        # collectives have twice the time: the report comes first, and is the better one
        _make_process_group(group, 2 * period or step_timeout)
    except BaseException:
        # those who know us must hear of it, from the hook; if nobody does, leave no trace
        if group.peer is None:
            forget(group)
        raise
    atexit.register(leave)
    if group.place.rank == 0:
        print(f"headway: launched by: {_launched_by(group.world, found)}", file=sys.stderr, flush=True)
    return group.world


def _period(step_timeout: float) -> float:
    """Seconds that ranks may stand still; 0 if nobody is to watch."""
    text = os.environ.get("HEADWAY_WATCHDOG", str(step_timeout))
    try:
        period = float(text)
    except ValueError:
        period = -1.0
    if not 0 <= period < math.inf:
        raise UsageError(f"HEADWAY_WATCHDOG={text!r}: give seconds, such as 600, or 0 to watch nothing")
    return period


def _launched_by(world: World, seat: RankPlacement) -> str:
    if world.launcher == "none":
        return f"python alone, 1 process on {world.device}"
    return f"{world.launcher}, {seat.spread} on {world.device.type}"


def _meet(group: RankGroup, timeout: float) -> RankPlacement:
    """Finds the other ranks. Afterwards the group has its members, a store, and a line to the hub."""
    place = group.place
    me = RankInfo(
        rank=place.rank,
        host=socket.gethostname(),
        node=place.node,
        pid=os.getpid(),
        local_rank=place.local_rank,
        visible_gpus=os.environ.get("CUDA_VISIBLE_DEVICES"),
    )
    if place.world_size == 1:
        return seats([me])[0]
    meeting: Rendezvous
    if place.store_address is None:
        meeting = file_rendezvous(place)
        meeting.check()
    else:
        group.store = _launchers_store(place, timeout)
        meeting = StoreRendezvous(group.store)
    if place.rank == 0:
        _open_hub(group, meeting, timeout)
    try:
        group.peer, welcome, host = connect_to_hub(meeting, me, timeout, HEARTBEAT)
    except RankFailure as error:
        absent = group.hub.missing() if group.hub else []
        if absent:
            raise RankFailure(
                f"{len(absent)} of {place.world_size} ranks did not come within {timeout:.0f} s: "
                f"{', '.join(map(str, absent[:16]))}; look at the start of their output, or raise setup_timeout"
            ) from error
        raise
    finally:
        if group.hub:
            meeting.close()
    group.root = RankInfo(**welcome["root"])
    group.peer.watch(group.others_failed, group.hub_lost, group.hub_silent)
    if isinstance(meeting, FileRendezvous):
        _export_address(group, host, int(welcome["store_port"]))
        if place.rank != 0:
            group.store = c10d.TCPStore(host, int(welcome["store_port"]), timeout=timedelta(seconds=timeout))
    return RankPlacement(**welcome["seat"])


def _launchers_store(place: LaunchEnvironment, timeout: float) -> c10d.Store:
    """The store behind MASTER_ADDR: torchrun's own, or one that rank 0 opens at the address the user chose."""
    os.environ.setdefault("RANK", str(place.rank))
    os.environ.setdefault("WORLD_SIZE", str(place.world_size))
    address = c10d.rendezvous("env://", place.rank, place.world_size, timeout=timedelta(seconds=timeout))
    store: c10d.Store = next(address)[0]
    return store


def _open_hub(group: RankGroup, meeting: Rendezvous, timeout: float) -> None:
    """Rank 0 listens, and says where. The store's port, too, is the kernel's choice."""
    listener, hosts = listen(group.place)
    key = secrets.token_bytes(32)
    welcome = {}
    if isinstance(meeting, FileRendezvous):
        server, _ = listen(group.place)
        welcome["store_port"] = server.getsockname()[1]
        group.store = c10d.TCPStore(
            "127.0.0.1",
            welcome["store_port"],
            is_master=True,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
            master_listen_fd=server.detach(),
        )
    group.hub = Hub(
        listener,
        key,
        group.place.world_size,
        welcome=welcome,
        on_verdict=group.verdict,
        on_end=group.everybody_is_down,
        heart=HEARTBEAT,
    )
    group.hub.start()
    meeting.publish(HubAddress(hosts=hosts, port=listener.getsockname()[1], key=key))


def _export_address(group: RankGroup, host: str, port: int) -> None:
    group.export("MASTER_ADDR", host)
    group.export("MASTER_PORT", str(port))


def _sit_down(group: RankGroup, found: RankPlacement, device: str) -> World:
    """Takes this rank's device and tells the rest of the process, in torchrun's words, who it is."""
    place = group.place
    chosen = choose_device(device, found, place.world_size)
    for name, value in {
        "RANK": place.rank,
        "WORLD_SIZE": place.world_size,
        "LOCAL_RANK": found.local_rank,
        "LOCAL_WORLD_SIZE": found.local_world_size,
        "GROUP_RANK": found.node_rank,
        "GROUP_WORLD_SIZE": found.nodes,
    }.items():
        group.export(name, str(value))
    if found.nodes == 1:
        # without this gloo asks the host's name for an address, which many a laptop and container cannot answer
        group.export("GLOO_SOCKET_IFNAME", _loopback(), override=False)
    if place.world_size > 1 and (found.nodes > 1 or chosen.type == "cuda"):
        _tune_network(group, found.nodes)
    return World(
        rank=place.rank,
        world_size=place.world_size,
        local_rank=found.local_rank,
        local_world_size=found.local_world_size,
        node_rank=found.node_rank,
        nodes=found.nodes,
        host=socket.gethostname(),
        launcher=place.launcher,
        device=chosen,
    )


def _check_gpus_differ(group: RankGroup, found: RankPlacement) -> None:
    """Two ranks on one GPU fail deep inside NCCL, long after the mistake: say it now."""
    world = group.world
    assert world is not None
    if world.device.type != "cuda" or world.local_world_size == 1 or "NCCL_HOSTID" in os.environ:
        return  # whoever sets NCCL_HOSTID shares a GPU on purpose
    mine = str(torch.cuda.get_device_properties(world.device).uuid)
    group.store.set(f"headway/gpu/{world.rank}", mine)
    for other in found.neighbours[: found.neighbours.index(world.rank)]:
        if group.store.get(f"headway/gpu/{other}").decode() == mine:
            raise UsageError(
                f"ranks {other} and {world.rank} on {world.host} have the same GPU ({world.device}); start at most one "
                f"rank per GPU, or use device='cpu'"
            )


def _tune_network(group: RankGroup, nodes: int) -> None:
    """Makes the few settings that this machine needs and nobody has made, and says which and why."""
    settings = nccl_settings(machine.detect(), nodes, {**read_conf(os.environ, Path("/")), **os.environ})
    for setting in settings:
        if setting.value is not None:
            group.export(setting.name, setting.value, override=False)
        if group.place.rank == 0:
            print(f"headway: {setting}", file=sys.stderr)


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


def leave() -> None:
    """Leaves the group and puts back what `init` set. Called at exit; rank 0 stays until all others have left."""
    group = mine()
    if group is None:
        return
    HEARTBEAT.stop()
    if group.peer is not None:
        group.peer.leave(_LEAVE_TOGETHER)
    if c10d.is_initialized():
        c10d.destroy_process_group()
    if group.hub is not None:
        group.hub.everybody_left.wait()
    if group.peer is not None:
        group.peer.close()
    exit_group(group)
    atexit.unregister(leave)
