"""Networks that fail, or are not there: each node is a network namespace with a host name of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from waiting import wait_until

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("unshare") is None,
    reason="network namespaces need root",
)
BIN = Path(sys.executable).parent
RANK = """
import os, time
from pathlib import Path
from headway.dist.control import channel
channel._SILENT_S = 6
import headway as hw
world = hw.init(device="cpu", setup_timeout=60)
Path(os.environ["MARK"] + str(world.rank)).touch()
time.sleep(100)
"""


class Nodes:
    """Two nodes with a link between them, at the addresses .1 and .2 of a network that nobody else uses."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._id = directory, f"hw{os.getpid() % 100000}"
        self._net = f"10.{200 + os.getpid() % 50}.{os.getpid() // 50 % 250}"
        self.names = [f"{self._id}n{number}" for number in range(2)]
        for name in self.names:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("link", "add", "eth0", "netns", self.names[0], "type", "veth",
            "peer", "name", "eth0", "netns", self.names[1])  # fmt: skip
        for number, name in enumerate(self.names):
            _ip("-n", name, "addr", "add", f"{self.address(number)}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")

    def address(self, number: int) -> str:
        return f"{self._net}.{number + 1}"

    def start(self, number: int, script: str, **variables: str) -> subprocess.Popen[bytes]:
        """Starts a rank as a launcher would that sets MASTER_ADDR; Debian's name of a host is 127.0.1.1."""
        hosts = self._directory / f"hosts-{number}"
        hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 node{number}\n")
        setup = f'hostname node{number}; mount --bind {hosts} /etc/hosts; exec {sys.executable} -c "$SCRIPT"'
        environ = os.environ | {
            "SCRIPT": script,
            "RANK": str(number),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": "29611",
            "MARK": str(self._directory / "joined-"),
            **variables,
        }
        command = [
            "ip",
            "netns",
            "exec",
            self.names[number],
            "unshare",
            "--uts",
            "--mount",
            "bash",
            "-c",
            setup,
        ]
        with (self._directory / f"said-{number}").open("w") as said:
            return subprocess.Popen(command, env=environ, cwd=self._directory, stderr=said)

    def cut(self) -> None:
        """Takes the link of one node away: no connection is closed."""
        _ip("-n", self.names[1], "link", "set", "eth0", "down")

    def remove(self) -> None:
        for name in self.names:
            _ip("netns", "del", name)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes(tmp_path)
    yield made
    made.remove()


def test_a_lost_link_is_named_on_both_sides_and_nobody_is_called_dead(nodes: Nodes, tmp_path: Path) -> None:
    ranks = [nodes.start(number, RANK) for number in range(2)]
    try:
        wait_until(lambda: len(list(tmp_path.glob("joined-*"))) == 2, "both have joined", timeout_s=60)
        nodes.cut()
        began = time.monotonic()
        for rank in ranks:
            rank.wait(60)
        assert time.monotonic() - began < 40
    finally:
        for rank in ranks:
            with suppress(ProcessLookupError):
                rank.kill()
            rank.communicate()
    for number in range(2):
        text = (tmp_path / f"said-{number}").read_text()
        last = text.strip().splitlines()[-1]
        assert number or "GLOO_SOCKET_IFNAME=eth0: " in text, (
            "the host name is 127.0.1.1, which reaches nobody"
        )
        assert f"the connection from node{number} to node{1 - number} was lost (" in last, text
        assert "kill -9" not in text and "check the network between these nodes" in last


def test_without_a_loopback_the_ranks_of_a_host_say_so(tmp_path: Path) -> None:
    name = f"hw{os.getpid() % 100000}lo"
    (tmp_path / "train.py").write_text("import headway as hw\nhw.init(device='cpu')\n")
    _ip("netns", "add", name)
    try:
        command = ["ip", "netns", "exec", name, str(BIN / "headway"), "run", "--nproc", "2", "train.py"]
        began = time.monotonic()
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
        assert time.monotonic() - began < 60, "ten seconds beside the imports"
    finally:
        _ip("netns", "del", name)
    assert done.returncode == 2
    assert "it has no loopback interface; start it with: ip link set lo up\n" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("  raised by rank "), done.stderr
