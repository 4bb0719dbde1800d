"""The start-up screen: about ten lines that rank 0 prints about the run, its hosts and its files.

`render` is a pure function of the contents and the width. Descriptions are cut to fit; paths and the command that
follows the log are not, because people copy them.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from headway import __version__
from headway.dist import World
from headway.record.terminal_lines import plain
from headway.run import Run
from headway.run.plain import leaves, to_plain
from headway.system.redact import redact_tree
from headway.system.text import plural

_MARGIN = 12  # columns for the labels
_CONFIG_LINES = 2


@final
@dataclass(frozen=True, kw_only=True)
class Screen:
    """The contents of the start-up screen."""

    name: str
    attempt: int
    where: str
    command: str
    files: str
    log: str
    versions: str
    code: str
    config: Sequence[str]


def describe(run: Run, world: World, facts: Mapping[str, Any], *, config: object = None) -> Screen:
    """Selects the contents of the screen from an attempt's diagnostics."""
    return Screen(
        name=run.name,
        attempt=facts["attempt"],
        where=_where(world, facts["device"] or world.device.type),
        command=_command(facts["argv"], run),
        files=shlex.quote(_near(run.path)),
        log=f"tail -f {shlex.quote(_near(run.log_file(0)))}",
        versions=_versions(facts),
        code=_code(facts["code"]),
        config=[f"{name}={value}" for name, value in leaves(redact_tree(to_plain(config)))],
    )


def render(screen: Screen, width: int = 80) -> Text:
    """Renders the screen as styled text; only lines with a path may be wider than `width`.

    print(render(screen, width=80).plain)
    """
    room = width - _MARGIN
    rows = [
        ("where", _cut(screen.where, room), ""),
        ("command", _cut(screen.command, room), ""),
        ("files", plain(screen.files), "cyan"),
        ("log", plain(screen.log), "cyan"),
        ("versions", _cut(screen.versions, room), ""),
        ("code", _cut(screen.code, room), ""),
        *(
            ("config" if not number else "", line, "")
            for number, line in enumerate(_packed(screen.config, room))
        ),
    ]
    tail = f"  attempt {screen.attempt}, headway {__version__}"
    text = Text.assemble((_cut(screen.name, width - len(tail)), "bold"), (f"{tail}\n\n", "dim"))
    for label, value, style in rows:
        text.append(f"  {label}".ljust(_MARGIN), "dim").append(value, style).append("\n")
    return text


def show(screen: Screen) -> None:
    """Prints the screen on stderr: in color on a terminal, as plain text elsewhere."""
    console = Console(file=sys.stderr, highlight=False, soft_wrap=True)
    console.print(render(screen, console.width))


def _where(world: World, device: str) -> str:
    """Formats host, launcher, nodes, ranks and device; leaves out trivial parts."""
    ranks = plural(world.world_size, "rank")
    if world.nodes > 1:
        even, rest = divmod(world.world_size, world.nodes)
        ranks = f"{world.nodes} nodes, {ranks}" if rest else f"{world.nodes} nodes x {even} ranks"
    launcher = "" if world.launcher == "none" else f"{world.launcher}, "
    return f"{world.host}, {launcher}{ranks} on {device}"


def _versions(facts: Mapping[str, Any]) -> str:
    torch, driver = facts["torch"], facts["driver"]
    named = [("python", facts["python"]["version"]), ("torch", torch["version"])]
    named += [("CUDA", torch["cuda"]), ("ROCm", torch["hip"]), ("driver", driver and driver["version"])]
    return ", ".join(f"{name} {version}" for name, version in named if version)


def _code(code: Mapping[str, Any]) -> str:
    if not code["commit"]:
        return str(code["note"] or "a git repository without a commit").partition(" (")[0]
    branch = f" on {code['branch']}" if code["branch"] else ""
    changes = ", uncommitted changes in code/" if code["dirty"] else ""
    return f"{code['commit'][:10]}{branch}{changes}"


def _packed(settings: Sequence[str], room: int) -> list[str]:
    """Returns as many settings as fit into `_CONFIG_LINES` lines, and the number of the others."""
    for shown in range(min(len(settings), 40), -1, -1):
        rest = len(settings) - shown
        lines: list[str] = []
        for item in [*settings[:shown], *([f"+{rest} in config.yaml"] if rest else [])]:
            item = _cut(item, min(room, 48))
            if lines and cell_len(lines[-1]) + 2 + cell_len(item) <= room:
                lines[-1] += f"  {item}"
            else:
                lines.append(item)
        if len(lines) <= _CONFIG_LINES:
            break
    return lines


def _command(argv: Sequence[str], run: Run) -> str:
    """Returns a command as its user wrote it: the path of the script in a job hides the options."""
    program, *words = argv
    return shlex.join([Path(program).name, *(word.removeprefix(f"{run.work_dir}/") for word in words)])


def _cut(text: str, room: int) -> str:
    text = plain(text)
    return text if cell_len(text) <= room else set_cell_size(text, max(room - 3, 0)).rstrip(" ,") + "..."


def _near(path: Path) -> str:
    """Returns a path relative to the working directory if it is inside it, else the absolute one."""
    path, here = path.absolute(), Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
