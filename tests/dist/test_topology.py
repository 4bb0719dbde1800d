"""Machines of four kinds, as NVML and /sys would show them, and the settings that each one gets."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from headway.dist.topology.machine import GpuLink, Nic, Port, Topology, describe_gpus, detect, virtual_prefix
from headway.dist.topology.nccl import Setting, nccl_settings, read_conf
from headway.dist.topology.nvml import Gpu, pci_address, read_driver, read_gpus

MACHINES = Path(__file__).parent / "machines"

Load = Callable[[str], Topology]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """A machine from its file: /sys and /proc in a folder, NVML and the resolver answering as it says."""

    def machine(name: str) -> Topology:
        facts = json.loads((MACHINES / f"{name}.json").read_text())
        for path, text in facts["files"].items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(f"{text}\n")
        return detect(
            root=tmp_path,
            gpus=lambda: [Gpu(**gpu) for gpu in facts["gpus"]],
            resolve=lambda _: facts["address"],
        )

    return machine


def names(settings: list[Setting]) -> dict[str, str | None]:
    return {setting.name: setting.value for setting in settings}


# ---- what is there


def test_dgx_h100(load: Load) -> None:
    machine = load("dgx-h100")
    assert len(machine.gpus) == 8
    assert [gpu.numa for gpu in machine.gpus] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert len(machine.links) == 28
    assert {(link.kind, link.count, link.via) for link in machine.links} == {("nvlink", 18, "switch")}
    assert [node.cpus for node in machine.numa] == ["0-55,112-167", "56-111,168-223"]
    assert sum(port.layer == "InfiniBand" and port.active for port in machine.ports) == 8
    assert [port.device for port in machine.ports][-2:] == ["mlx5_10", "mlx5_11"]  # counted, not spelled
    assert "bonding_masters" not in {nic.name for nic in machine.nics}
    assert machine.describe() == (
        "8 x NVIDIA H100 80GB HBM3, all pairs by 18 NVLinks through a switch; "
        "10 of 10 Ethernet and InfiniBand ports active at 200/400 Gb/s"
    )


def test_a_tray_of_an_nvl72_is_a_machine_of_four_gpus_in_a_fabric(load: Load) -> None:
    machine = load("gb200-nvl72-tray")
    assert len(machine.gpus) == 4
    assert len({gpu.fabric for gpu in machine.gpus}) == 1
    assert describe_gpus(machine) == (
        "4 x NVIDIA GB200, all pairs by 18 NVLinks through a switch, in an NVLink fabric with other machines"
    )
    assert [(node.index, node.cpus) for node in machine.numa][:3] == [(0, "0-71"), (1, "72-143"), (2, "")]


def test_gpus_on_pcie(load: Load) -> None:
    machine = load("pcie-4x4090")
    assert {(link.kind, link.count, link.via) for link in machine.links} == {("pcie", 1, "host bridge")}
    assert [gpu.numa for gpu in machine.gpus] == [None] * 4
    up = {nic.name: (nic.virtual, nic.mbits, nic.default) for nic in machine.nics if nic.up}
    assert up["enp68s0"] == (False, 10000, True)
    assert up["tailscale0"] == (True, None, False)
    assert [nic.mbits for nic in machine.nics if nic.name == "enp69s0"] == [None]  # the kernel says -1
    assert machine.describe() == "4 x NVIDIA GeForce RTX 4090, all pairs by PCIe (host bridge); no InfiniBand"


def test_a_laptop(load: Load) -> None:
    machine = load("laptop")
    assert machine.describe() == "no NVIDIA GPU; no InfiniBand"
    assert [nic.name for nic in machine.nics if nic.default] == ["wlp0s20f3"]


def test_bridged_pairs_are_linked_directly_and_the_rest_by_pcie() -> None:
    def gpu(index: int, partner: int) -> Gpu:
        pcie = {f"0000:0{other}:00.0": "between CPU sockets" for other in range(4) if other != index}
        pci = f"0000:0{index}:00.0"
        nvlinks = {f"0000:0{partner}:00.0": 4}
        return Gpu(index=index, name="A6000", memory=1, uuid="", pci=pci, nvlinks=nvlinks, pcie=pcie)

    machine = detect(gpus=lambda: [gpu(0, 1), gpu(1, 0), gpu(2, 3), gpu(3, 2)])
    assert machine.links[0] == GpuLink(a=0, b=1, kind="nvlink", count=4, via="direct")
    assert machine.links[1] == GpuLink(a=0, b=2, kind="pcie", count=1, via="between CPU sockets")
    assert describe_gpus(machine) == "4 x A6000, 2 of 6 pairs by NVLink"


def test_a_lost_nvlink_shows_in_the_pairs_of_that_gpu() -> None:
    facts = json.loads((MACHINES / "dgx-h100.json").read_text())["gpus"]
    facts[3]["nvlinks"]["switch"] = 12
    machine = detect(gpus=lambda: [Gpu(**gpu) for gpu in facts])
    assert {(link.a, link.b) for link in machine.links if link.count == 12} == {
        (min(3, other), max(3, other)) for other in range(8) if other != 3
    }


def test_this_machine_can_be_looked_at_and_written_as_json() -> None:
    machine = detect()
    assert machine.host == socket.gethostname()
    assert json.loads(json.dumps(machine.to_dict()))["host"] == machine.host
    assert {nic.name for nic in machine.nics} == {
        entry.name for entry in Path("/sys/class/net").iterdir() if (entry / "operstate").exists()
    }
    assert (read_driver() is None) == (read_gpus() == [])


def test_a_name_that_resolves_to_nothing_is_no_error(tmp_path: Path) -> None:
    def resolve(_: str) -> str:
        raise socket.gaierror(-2, "Name or service not known")

    assert detect(root=tmp_path, gpus=list, resolve=resolve) == Topology(
        host=socket.gethostname(), gpus=[], links=[], ports=[], nics=[], numa=[]
    )


def test_the_default_interface_is_that_of_the_best_default_route(tmp_path: Path) -> None:
    """A VPN takes half of all addresses, 0.0.0.0/1, and a second default route has a worse metric."""
    routes = ["tun0 00000000 0 1 0 0 0 00000080", "wlan0 00000000 0 3 0 0 600 00000000"]
    routes += ["eth0 00000000 0 3 0 0 100 00000000", "eth1 0000A8C0 0 1 0 0 0 0000FFFF"]
    (tmp_path / "proc/net").mkdir(parents=True)
    (tmp_path / "proc/net/route").write_text("\n".join(["Iface Destination ...", *routes]))
    for name in ("tun0", "wlan0", "eth0", "eth1"):
        (tmp_path / "sys/class/net" / name).mkdir(parents=True)
        (tmp_path / "sys/class/net" / name / "operstate").write_text("up\n")
    assert [nic.name for nic in detect(root=tmp_path, gpus=list).nics if nic.default] == ["eth0"]


@pytest.mark.parametrize(
    "name", ["lo", "docker0", "veth12", "br-0123456789ab", "virbr0", "cni0", "tun0", "wg0"]
)
def test_interfaces_of_containers_and_tunnels_are_virtual(name: str) -> None:
    assert virtual_prefix(name)


@pytest.mark.parametrize(
    "name", ["eth0", "enp1s0", "bond0", "ib0", "hsn0", "em1", "br0", "br-storage", "lom1"]
)
def test_interfaces_that_may_lead_to_other_nodes_are_not(name: str) -> None:
    assert not virtual_prefix(name)


def test_pci_addresses_are_written_as_in_sysfs() -> None:
    assert pci_address("00000008:0A:00.0") == "0008:0a:00.0"


# ---- what to set


@pytest.mark.parametrize("name", ["dgx-h100", "gb200-nvl72-tray", "pcie-4x4090"])
def test_on_one_node_nothing_but_the_log_level_is_set(load: Load, name: str) -> None:
    assert names(nccl_settings(load(name), 1, {})) == {"NCCL_DEBUG": "WARN"}


@pytest.mark.parametrize("name", ["dgx-h100", "gb200-nvl72-tray"])
def test_machines_with_infiniband_need_nothing_more_on_many_nodes(load: Load, name: str) -> None:
    assert names(nccl_settings(load(name), 18, {})) == {"NCCL_DEBUG": "WARN"}


def test_a_machine_without_gpus_is_left_alone(load: Load) -> None:
    assert nccl_settings(load("laptop"), 1, {}) == []


def test_container_networks_are_kept_from_nccl_and_gloo_on_several_nodes(load: Load) -> None:
    settings = nccl_settings(load("pcie-4x4090"), 2, {})
    assert names(settings) == {
        "GLOO_SOCKET_IFNAME": "enp68s0",
        "NCCL_DEBUG": "WARN",
        "NCCL_SOCKET_IFNAME": "^lo,docker,virbr,br-3f9a1c77be02,tailscale,veth",
    }
    gloo, _, nccl = settings
    assert "resolves to 127.0.1.1" in gloo.why
    assert "br-3f9a1c77be02, tailscale0, veth1a2b3c4 and 1 more" in nccl.why


def test_what_the_user_has_set_is_never_touched(load: Load) -> None:
    chosen = {
        "NCCL_DEBUG": "INFO",
        "NCCL_SOCKET_IFNAME": "docker0",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_IB_HCA": "x",
    }
    assert nccl_settings(load("pcie-4x4090"), 2, chosen) == []


def test_interfaces_are_left_to_nccl_when_infiniband_has_addresses_or_nothing_real_is_up(load: Load) -> None:
    box = load("pcie-4x4090")
    ib = Nic(name="ib0", up=True, mbits=None, virtual=False, default=False)
    assert "NCCL_SOCKET_IFNAME" not in names(nccl_settings(replace(box, nics=[*box.nics, ib]), 2, {}))
    virtual = [nic for nic in box.nics if nic.virtual]
    assert "NCCL_SOCKET_IFNAME" not in names(nccl_settings(replace(box, nics=virtual), 2, {}))


def test_when_no_interface_is_clearly_right_gloo_is_left_alone_and_that_is_said(load: Load) -> None:
    box = load("pcie-4x4090")
    lost = replace(box, address=None, nics=[replace(nic, default=False) for nic in box.nics])
    [gloo] = [setting for setting in nccl_settings(lost, 2, {}) if setting.name == "GLOO_SOCKET_IFNAME"]
    assert gloo.value is None
    assert "resolves to nothing" in gloo.why
    assert "GLOO_SOCKET_IFNAME left as it is" in str(gloo)


def test_a_name_that_other_nodes_can_reach_needs_no_gloo_setting(load: Load) -> None:
    assert "GLOO_SOCKET_IFNAME" not in names(
        nccl_settings(replace(load("laptop"), address="10.0.0.5"), 4, {})
    )


def test_ports_that_are_down_are_named_and_left_to_nccl(load: Load) -> None:
    dgx = load("dgx-h100")
    ports = [replace(port, active=port.device != "mlx5_4") for port in dgx.ports]
    [_, hca] = nccl_settings(replace(dgx, ports=ports), 2, {})
    assert (hca.name, hca.value) == ("NCCL_IB_HCA", None)
    assert hca.why.startswith("mlx5_4 port 1 not active")
    assert "9 of 10 ports" in hca.why


def test_states_of_ports_are_read_as_the_kernel_writes_them(tmp_path: Path) -> None:
    for number, state in enumerate(["1: DOWN", "2: INIT", "3: ARMED", "4: ACTIVE", "5: ACTIVE_DEFER"], 1):
        folder = tmp_path / "sys/class/infiniband/mlx5_0/ports" / str(number)
        folder.mkdir(parents=True)
        (folder / "state").write_text(f"{state}\n")
        (folder / "rate").write_text("2.5 Gb/sec (1X SDR)\n")
    ports = detect(root=tmp_path, gpus=list).ports
    assert [port.active for port in ports] == [False, False, False, True, False]
    assert ports[0] == Port(device="mlx5_0", port=1, active=False, gbits=2.5, layer="InfiniBand")


@pytest.mark.parametrize(
    ("machine", "nodes", "choice", "said"),
    [
        ("dgx-h100", 2, {"NCCL_IB_DISABLE": "1"}, "over TCP, past 10 active ports"),
        ("dgx-h100", 1, {"NCCL_PROTO": "LL128"}, "LL128 can corrupt data"),
        ("dgx-h100", 1, {"NCCL_PROTO": "Simple,ll128"}, "can corrupt data"),
        ("dgx-h100", 1, {"NCCL_P2P_DISABLE": "1"}, "NVLinks of this machine unused"),
    ],
)
def test_harmful_choices_of_others_are_left_alone_but_named(
    load: Load, machine: str, nodes: int, choice: dict[str, str], said: str
) -> None:
    [setting] = nccl_settings(load(machine), nodes, {**choice, "NCCL_DEBUG": "WARN"})
    assert setting.value is None
    assert str(setting).startswith(f"{next(iter(choice))} left as it is: ")
    assert said in setting.why


@pytest.mark.parametrize(
    ("machine", "nodes", "choice"),
    [
        ("dgx-h100", 1, {"NCCL_IB_DISABLE": "1"}),  # on one node it changes nothing
        ("pcie-4x4090", 1, {"NCCL_P2P_DISABLE": "1"}),  # a known remedy there
        ("dgx-h100", 1, {"NCCL_PROTO": "^LL128"}),
    ],
)
def test_harmless_choices_are_not_talked_about(
    load: Load, machine: str, nodes: int, choice: dict[str, str]
) -> None:
    assert nccl_settings(load(machine), nodes, {**choice, "NCCL_DEBUG": "WARN"}) == []


@pytest.mark.parametrize("machine", ["dgx-h100", "gb200-nvl72-tray", "pcie-4x4090", "laptop"])
@pytest.mark.parametrize("nodes", [1, 2, 18])
def test_nothing_harmful_is_ever_set(load: Load, machine: str, nodes: int) -> None:
    made = {setting.name for setting in nccl_settings(load(machine), nodes, {}) if setting.value is not None}
    assert made <= {"NCCL_DEBUG", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"}


def test_settings_are_told_with_their_reason(load: Load) -> None:
    [setting] = nccl_settings(load("dgx-h100"), 1, {})
    assert str(setting) == "NCCL_DEBUG=WARN: when NCCL fails, its warning names the cause"


# ---- what NCCL's own files say


def test_the_users_file_comes_before_the_sites(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/nccl.conf").write_text(
        "# the site's\nNCCL_SOCKET_IFNAME=hsn\nNCCL_DEBUG=INFO\nnonsense\n"
    )
    (tmp_path / ".nccl.conf").write_text("NCCL_DEBUG=TRACE\n#NCCL_PROTO=LL128\n")
    found = read_conf({"HOME": str(tmp_path)}, tmp_path)
    assert found == {"NCCL_DEBUG": "TRACE", "NCCL_SOCKET_IFNAME": "hsn"}
    assert read_conf({}, tmp_path / "nowhere") == {}


def test_a_named_nccl_file_replaces_the_one_at_home(tmp_path: Path) -> None:
    (tmp_path / ".nccl.conf").write_text("NCCL_DEBUG=TRACE\n")
    (tmp_path / "mine").write_text("NCCL_NET=Socket\n")
    environ = {"HOME": str(tmp_path), "NCCL_CONF_FILE": str(tmp_path / "mine")}
    assert read_conf(environ, tmp_path) == {"NCCL_NET": "Socket"}
