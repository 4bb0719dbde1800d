"""Where to run: frozen descriptions, checked when they are made, the same in Python, in YAML and on the command line.

    on = Slurm(nodes=2, gpus_per_node=8, time="2:00:00", partition="gpu")
    Slurm.from_dict(on.to_dict()) == on
    read(Path("cluster.yaml"))            # kind: slurm, nodes: 2, ...

Nothing here asks a machine or a scheduler: a description can be made anywhere, also where it cannot run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar, Self, final

import yaml

from headway.errors import UsageError

DEVICES = ("auto", "cpu", "cuda", "mps")
_TOKEN = re.compile(r"""[^\s'"\\#]+""")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OPTION = re.compile(r"[a-z][a-z0-9-]*")
_MEMORY = re.compile(r"\d+[KMGT]?", re.IGNORECASE)
_GPUS = re.compile(r"(?:[A-Za-z][\w.-]*:)?(\d+)")
_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<rest>\d+(?::\d+){0,2})")
_OURS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
_OWN_OPTIONS = (
    "job-name",
    "output",
    "error",
    "open-mode",
    "signal",
    "no-requeue",
    "wrap",
    "parsable",
    "test-only",
)
_LONGEST_LEAD = 65535  # what SLURM can keep


def option(default: Any, help: str) -> Any:
    """A field of a target, with the words in which the command line explains it."""
    if isinstance(default, dict):
        return field(default_factory=dict, metadata={"help": help})
    return field(default=default, metadata={"help": help})


class Target:
    """What all targets share: a kind, and the way to plain values and back."""

    kind: ClassVar[str]
    env: Mapping[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON and YAML; only what differs from the defaults."""
        changed = {
            each.name: _plain(getattr(self, each.name))
            for each in target_fields(type(self))
            if getattr(self, each.name) != _default(each)
        }
        return {"kind": self.kind, **changed}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The target of these values; `UsageError` names a key that does not exist, and the nearest that does."""
        names = [each.name for each in target_fields(cls)]
        given = {str(key).replace("-", "_"): value for key, value in values.items() if key != "kind"}
        if values.get("kind", cls.kind) != cls.kind:
            raise UsageError(f"kind: {values['kind']!r} is not a description of {cls.kind}")
        for name in given:
            if name not in names:
                close = get_close_matches(name, names, n=1)
                hint = f"; did you mean {close[0]!r}?" if close else f": it has {', '.join(names)}"
                raise UsageError(f"{cls.kind} has no setting {name!r}{hint}")
        return cls(**given)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # frozen for everybody else: only while it is made

    def _check_env(self) -> None:
        self._set("env", {str(name): str(value) for name, value in _mapping(self.env, "env").items()})
        for name, value in self.env.items():
            if not _VARIABLE.fullmatch(name) or "\0" in value:
                raise UsageError(
                    f"env: {name!r:.80} cannot be the name of a variable; use letters, digits and '_'"
                )
            if name in _OURS:
                raise UsageError(f"env: {name} is set by headway for each rank; leave it out")


@final
@dataclass(frozen=True, kw_only=True)
class Local(Target):
    """This machine.

    >>> Local(processes=4, device="cpu")
    """

    kind: ClassVar[str] = "local"
    processes: int = option(1, "number of ranks")
    device: str = option("auto", "auto, cpu, cuda or mps")
    env: Mapping[str, str] = option({}, "variables for the ranks")

    def __post_init__(self) -> None:
        _at_least(1, self.processes, "processes")
        if self.device not in DEVICES:
            raise UsageError(f"device={self.device!r} is none of {', '.join(DEVICES)}")
        if self.device == "mps" and self.processes > 1:
            raise UsageError(
                f"processes={self.processes}: Apple's GPU serves one process; take device='cpu' for more"
            )
        self._check_env()


@final
@dataclass(frozen=True, kw_only=True)
class Mpi(Target):
    """Machines that `mpirun` reaches.

    >>> Mpi(processes=4, hosts=("n1:2", "n2:2"))
    """

    kind: ClassVar[str] = "mpi"
    processes: int = option(1, "number of ranks, one per MPI process")
    hosts: tuple[str, ...] = option((), "hosts to use, each with its slots: n1:2")
    mpirun: str = option("mpirun", "the program that starts MPI processes")
    args: tuple[str, ...] = option((), "further arguments for mpirun")
    env: Mapping[str, str] = option({}, "variables for the ranks")

    def __post_init__(self) -> None:
        _at_least(1, self.processes, "processes")
        self._set("hosts", _texts(self.hosts, "hosts"))
        self._set("args", _texts(self.args, "args"))
        for host in self.hosts:
            if not re.fullmatch(r"[A-Za-z0-9][\w.-]*(:\d+)?", host):
                raise UsageError(f"hosts: {host!r:.80} is not a host; write NAME or NAME:SLOTS")
        self._check_env()


@final
@dataclass(frozen=True, kw_only=True)
class Slurm(Target):
    """A SLURM cluster; settings bear the names of sbatch's options.

    >>> Slurm(nodes=2, gpus_per_node=8, time="2:00:00", partition="gpu", setup=["module load cuda"])
    """

    kind: ClassVar[str] = "slurm"
    nodes: int = option(1, "number of nodes")
    gpus_per_node: int | str | None = option(None, "GPUs of each node: 8, or a100:8")
    ntasks_per_node: int | None = option(None, "ranks on each node (default: one per GPU, or one)")
    cpus_per_task: int | None = option(None, "CPUs of each rank")
    mem: str | None = option(None, "memory of each node: 64G; 0 is all of it")
    time: str | None = option(None, "time limit: minutes, H:M:S or D-H:M:S")
    partition: str | None = option(None, "partition, or several with commas")
    account: str | None = option(None, "account to charge")
    qos: str | None = option(None, "quality of service")
    constraint: str | None = option(None, "features that nodes must have")
    exclusive: bool = option(False, "share the nodes with no other job")
    array: tuple[str, ...] = option((), "NAME=V1,V2 ...: one job of an array for each combination of values")
    array_limit: int | None = option(None, "how many jobs of the array may run at once")
    extra: Mapping[str, Any] = option({}, "any other option of sbatch: licenses=fluent:1")
    setup: tuple[str, ...] = option((), "shell lines to run first on the first node: 'module load cuda'")
    pre: tuple[str, ...] = option((), "file or folder to copy to each node's own disk before the ranks start")
    pre_to: str = option(
        "$SLURM_TMPDIR", "where to; variables are those of the node. Ranks find it in HEADWAY_STAGED"
    )
    env: Mapping[str, str] = option({}, "variables for the ranks")
    signal_lead: int = option(120, "seconds before the time limit at which ranks are told to save and stop")
    requeue: bool = option(True, "queue the job again when it was stopped with a checkpoint")
    max_requeues: int = option(100, "how often at most")
    max_restarts: int = option(0, "restarts on the same nodes after a crash, as long as each made progress")

    def __post_init__(self) -> None:
        _at_least(1, self.nodes, "nodes")
        _at_least(1, self.ntasks_per_node, "ntasks_per_node")
        _at_least(1, self.cpus_per_task, "cpus_per_task")
        _at_least(1, self.array_limit, "array_limit")
        _at_least(0, self.max_requeues, "max_requeues")
        _at_least(0, self.max_restarts, "max_restarts")
        for name in ("mem", "time"):  # YAML reads a number where SLURM wants text
            value = getattr(self, name)
            self._set(name, value if value is None else str(value))
        for name in ("partition", "account", "qos", "constraint"):
            _token(getattr(self, name), name)
        if self.gpus_per_node is not None and not _GPUS.fullmatch(str(self.gpus_per_node)):
            raise UsageError(
                f"gpus_per_node={self.gpus_per_node!r:.80} is neither a number nor TYPE:NUMBER, like a100:8"
            )
        if self.mem is not None and not _MEMORY.fullmatch(self.mem):
            raise UsageError(f"mem={self.mem!r:.80} is no amount of memory; write 64G")
        self._set("setup", _texts(self.setup, "setup"))
        self._set("array", _texts(self.array, "array"))
        self._set("pre", _texts(self.pre, "pre"))
        for path in self.pre:
            if not Path(path).is_absolute():
                raise UsageError(f"pre: {path!r:.80} must be a full path: the job starts in another folder")
        self._check_lead()
        self._check_extra()
        self._check_env()

    @property
    def processes_per_node(self) -> int:
        """Ranks on each node: as many as were asked for, else one per GPU, else one."""
        if self.ntasks_per_node is not None:
            return self.ntasks_per_node
        return max(1, self.gpus)

    @property
    def processes(self) -> int:
        """Ranks in all."""
        return self.nodes * self.processes_per_node

    @property
    def gpus(self) -> int:
        """GPUs of each node."""
        match = _GPUS.fullmatch(str(self.gpus_per_node or 0))
        return int(match[1]) if match else 0

    def alone(self) -> Slurm:
        """The same settings without the array: for one of its jobs that starts again."""
        return replace(self, array=(), array_limit=None)

    def _check_lead(self) -> None:
        _at_least(1, self.signal_lead, "signal_lead")
        if self.signal_lead > _LONGEST_LEAD:
            raise UsageError(f"signal_lead={self.signal_lead}: SLURM takes at most {_LONGEST_LEAD} seconds")
        if self.time is not None and seconds(self.time) <= self.signal_lead:
            raise UsageError(
                f"time={self.time!r} is {seconds(self.time)} s, of which signal_lead={self.signal_lead} to save: "
                "ask for more time, or set a shorter signal_lead"
            )

    def _check_extra(self) -> None:
        extra = {
            str(name).replace("_", "-").lstrip("-"): value
            for name, value in _mapping(self.extra, "extra").items()
        }
        self._set("extra", extra)
        own = {each.name.replace("_", "-") for each in target_fields(Slurm)} - {"env", "setup", "extra"}
        for name, value in extra.items():
            if not _OPTION.fullmatch(name):
                raise UsageError(
                    f"extra: {name!r:.80} is not an option of sbatch; write licenses, nodelist, ..."
                )
            if name in own:
                raise UsageError(
                    f"extra: {name} has a setting of its own: {name.replace('-', '_')}={value!r:.80}"
                )
            if name in _OWN_OPTIONS:
                raise UsageError(f"extra: --{name} is headway's to set; leave it out")
            if not isinstance(value, bool):
                _token(str(value), f"extra: {name}")


KINDS: Mapping[str, type[Local | Slurm | Mpi]] = {"local": Local, "slurm": Slurm, "mpi": Mpi}


def read(path: Path) -> Local | Slurm | Mpi:
    """The target that a YAML file describes: `kind: slurm`, then its settings."""
    try:
        values = yaml.safe_load(path.read_text())
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict) or values.get("kind") not in KINDS:
        raise UsageError(
            f"{path} does not say where to run; begin with a line like 'kind: slurm' ({', '.join(KINDS)})"
        )
    return KINDS[values["kind"]].from_dict(values)


def seconds(time: str) -> int:
    """A time limit as SLURM writes it, in seconds.

    >>> seconds("90"), seconds("1:30:00"), seconds("1-12"), seconds("2-0:30")
    (5400, 5400, 129600, 174600)
    """
    match = _TIME.fullmatch(time)
    if match is None:
        raise UsageError(f"time={time!r:.80} is no time limit; write minutes, H:M:S or D-H:M:S")
    parts = [int(part) for part in match["rest"].split(":")]
    if match["days"] is not None:  # D-H, D-H:M, D-H:M:S
        hours, minutes, rest = (*parts, 0, 0)[:3]
        return int(match["days"]) * 86400 + hours * 3600 + minutes * 60 + rest
    if len(parts) == 3:
        return parts[0] * 3600 + parts[1] * 60 + parts[2]
    return parts[0] * 60 + (parts[1] if len(parts) == 2 else 0)


def target_fields(kind: type[Target]) -> list[Field[Any]]:
    """The settings of a target, in the order in which people read them."""
    return list(fields(kind))  # type: ignore[arg-type]  # every target is a dataclass


def _default(each: Field[Any]) -> object:
    return each.default if each.default_factory is MISSING else each.default_factory()


def _plain(value: object) -> object:
    if isinstance(value, tuple):
        return list(value)
    return dict(value) if isinstance(value, Mapping) else value


def _at_least(least: int, value: object, name: str) -> None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
        raise UsageError(f"{name}={value!r:.80} must be a whole number of at least {least}")


def _token(value: object, name: str) -> None:
    if value is not None and (
        not isinstance(value, str) or not _TOKEN.fullmatch(value) or value.startswith("-")
    ):
        raise UsageError(
            f"{name}={value!r:.80} cannot be told to SLURM: no spaces, quotes, backslashes, '#' or leading '-'"
        )


def _texts(values: Iterable[str], name: str) -> tuple[str, ...]:
    if isinstance(values, str):
        raise UsageError(f"{name}={values!r:.80} must be a list of texts: [{values!r:.80}]")
    texts = tuple(values)
    for text in texts:
        if not isinstance(text, str) or "\0" in text:
            raise UsageError(f"{name}: {text!r:.80} is not text")
    return texts


def _mapping(values: object, name: str) -> Mapping[Any, Any]:
    if not isinstance(values, Mapping):
        raise UsageError(f"{name}={values!r:.80} must be a mapping of names to values")
    return values
