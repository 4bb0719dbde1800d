"""Targets, which describe where to run: frozen, checked at creation, the same in Python, YAML and on the command line.

    on = Slurm(nodes=2, gpus_per_node=8, time="2:00:00", partition="gpu")
    Slurm.from_dict(on.to_dict()) == on
    read_target(Path("cluster.yaml"))            # kind: slurm, nodes: 2, ...

Nothing here contacts a machine or a scheduler: a target can be created anywhere, even where it cannot run. A target
for another scheduler is a subclass of `ClusterTarget` whose `kind` is "module:Class".
"""

from __future__ import annotations

import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Self, final

import yaml
from yaml.constructor import ConstructorError

from headway import schedulers
from headway.dist.environment import check_device
from headway.errors import UsageError, unknown_name, yaml_problem
from headway.interpreter import module_command
from headway.record.alerts import alert_events
from headway.schedulers.base import JobRequest, Scheduler
from headway.schedulers.slurm.time_limit import parse_time_limit
from headway.system import files
from headway.yaml_loader import UniqueKeysLoader

_TOKEN = re.compile(r"""[^\s'"\\#]+""")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OPTION = re.compile(r"[a-z][a-z0-9-]*")
_MEMORY = re.compile(r"\d+[KMGT]?", re.IGNORECASE)
_GPUS = re.compile(r"(?:[A-Za-z][\w.-]*:)?(\d+)")
_NODES = re.compile(r"(\d+)(?:-(\d+))?")
_BASE_60 = re.compile(r"[-+]?\d+(:[0-5]?\d)+(\.\d*)?")
_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
_RESERVED_OPTIONS = (
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
_LONGEST_LEAD_S = 65535  # what SLURM can store


def option(default: Any, help: str) -> Any:
    """Returns a field of a target with its help text for the command line."""
    if isinstance(default, dict):
        return field(default_factory=dict, metadata={"help": help})
    return field(default=default, metadata={"help": help})


class Target(ABC):
    """The base of all targets: a kind, a number of ranks, and conversion to plain values and back."""

    kind: ClassVar[str]
    env: Mapping[str, str] = {}

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for JSON and YAML, without those that equal the defaults."""
        changed = {
            each.name: _plain(getattr(self, each.name))
            for each in target_fields(type(self))
            if getattr(self, each.name) != _default(each)
        }
        return {"kind": self.kind, **changed}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Makes a target from these values; `UsageError` names an unknown key and the nearest valid one."""
        names = [each.name for each in target_fields(cls)]
        given = {str(key).replace("-", "_"): value for key, value in values.items() if key != "kind"}
        if values.get("kind", cls.kind) != cls.kind:
            raise UsageError(f"kind: {values['kind']!r} does not describe a target of kind {cls.kind}")
        for name in given:
            if name not in names:
                raise unknown_name(f"setting of {cls.kind}", name, names)
        return cls(**given)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # only in __post_init__: afterwards it is frozen

    def _check_env(self) -> None:
        self._set("env", {str(name): str(value) for name, value in _mapping(self.env, "env").items()})
        for name, value in self.env.items():
            if not _VARIABLE.fullmatch(name) or "\0" in value:
                raise UsageError(
                    f"env: {name!r:.80} cannot be the name of a variable; use letters, digits and '_'"
                )
            if name in _RANK_VARIABLES:
                raise UsageError(f"env: {name} is set by headway for each rank; leave it out")


class ClusterTarget(Target):
    """A target whose nodes are allocated by a scheduler.

    A subclass is a frozen dataclass; it declares as fields what its users may set, and inherits the other defaults.
    """

    nodes: int | str = 1
    """how many, or a range such as "1-2" where the scheduler gives as many of them as are free"""
    array: tuple[str, ...] = ()
    array_limit: int | None = None
    setup: tuple[str, ...] = ()
    pre: tuple[str, ...] = ()
    pre_to: str = ""
    doctor: bool = False
    alert: tuple[str, ...] = ()
    signal_lead: int = 120
    requeue: bool = True
    max_requeues: int = 100
    max_attempts: int = 20
    progress: str = ""
    max_restarts: int = 0

    @property
    @abstractmethod
    def scheduler(self) -> Scheduler:
        """The scheduler that allocates the nodes."""

    @property
    @abstractmethod
    def nproc_per_node(self) -> int:
        """Number of ranks on each node."""

    @abstractmethod
    def options(self) -> Mapping[str, Any]:
        """Settings under the scheduler's own names, for `JobRequest.options`."""

    @property
    def node_range(self) -> tuple[int, int]:
        """The least and the most nodes."""
        least, _, most = str(_nodes(self.nodes)).partition("-")
        return int(least), int(most or least)

    @property
    def nproc(self) -> int:
        """Number of ranks in all; the most there may be, for a range of nodes."""
        return self.node_range[1] * self.nproc_per_node

    def without_array(self) -> Self:
        """Returns the same settings without the array, to start one of its jobs again."""
        return replace(self, array=(), array_limit=None) if self.array else self  # type: ignore[type-var]

    def request(self, *, name: str, directory: Path, log: Path, python: str = sys.executable) -> JobRequest:
        """Returns the request for the job that job.json in `directory` describes."""
        prepares = self.pre or self.doctor
        return JobRequest(
            name=name,
            directory=directory,
            log=log,
            agent=module_command("headway", "agent", "--run", python=python),
            epilogue=module_command("headway.launcher.epilogue", python=python),
            prologue=module_command("headway.launcher.prologue", python=python) if prepares else None,
            nodes=self.node_range[0],
            max_nodes=self.node_range[1],
            nproc_per_node=self.nproc_per_node,
            is_array=bool(self.array),
            array_limit=self.array_limit,
            signal_lead_s=self.signal_lead,
            requeue=self.requeue,
            setup=self.setup,
            options=self.options(),
            env=schedulers.environment(self.scheduler),
        )


@final
@dataclass(frozen=True, kw_only=True)
class Local(Target):
    """This machine.

    >>> Local(nproc=4, device="cpu")
    """

    kind: ClassVar[str] = "local"
    nproc: int = option(1, "number of ranks")
    device: str = option("auto", "auto, cpu, cuda or mps")
    env: Mapping[str, str] = option({}, "variables for the ranks")

    def __post_init__(self) -> None:
        _at_least(1, self.nproc, "nproc")
        check_device(self.device)
        if self.device == "mps" and self.nproc > 1:
            raise UsageError(f"nproc={self.nproc}: Apple's GPU serves one process; use device='cpu' for more")
        self._check_env()


@final
@dataclass(frozen=True, kw_only=True)
class Mpi(Target):
    """Machines that `mpirun` reaches.

    >>> Mpi(nproc=4, hosts=("n1:2", "n2:2"))
    """

    kind: ClassVar[str] = "mpi"
    nproc: int = option(1, "number of ranks, one per MPI process")
    hosts: tuple[str, ...] = option((), "hosts to use, each with its slots: n1:2")
    mpirun: str = option("mpirun", "the program that starts MPI processes")
    args: tuple[str, ...] = option((), "further arguments for mpirun")
    env: Mapping[str, str] = option({}, "variables for the ranks")

    def __post_init__(self) -> None:
        _at_least(1, self.nproc, "nproc")
        self._set("hosts", _texts(self.hosts, "hosts"))
        self._set("args", _texts(self.args, "args"))
        for host in self.hosts:
            if not re.fullmatch(r"[A-Za-z0-9][\w.-]*(:\d+)?", host):
                raise UsageError(f"hosts: {host!r:.80} is not a host; write NAME or NAME:SLOTS")
        self._check_env()


@final
@dataclass(frozen=True, kw_only=True)
class Slurm(ClusterTarget):
    """A SLURM cluster; settings have the names of sbatch's options.

    >>> Slurm(nodes=2, gpus_per_node=8, time="2:00:00", partition="gpu", setup=["module load cuda"])
    """

    kind: ClassVar[str] = "slurm"
    nodes: int | str = option(1, "number of nodes, or a range: 1-2 takes as many of them as are free")
    gpus_per_node: int | str | None = option(None, "GPUs of each node: 8, or a100:8")
    ntasks_per_node: int | None = option(None, "ranks on each node (default: one per GPU, or one)")
    cpus_per_task: int | None = option(None, "CPUs of each rank")
    mem: str | None = option(None, "memory of each node: 64G; 0 is all of it")
    time: str | None = option(None, "time limit: minutes, H:M:S or D-H:M:S")
    partition: str | None = option(None, "partition, or several with commas")
    account: str | None = option(None, "account to charge")
    qos: str | None = option(None, "quality of service")
    constraint: str | None = option(None, "features that nodes must have")
    exclusive: bool = option(False, "do not share the nodes with other jobs")
    array: tuple[str, ...] = option((), "NAME=V1,V2 ...: one job of an array for each combination of values")
    array_limit: int | None = option(None, "how many jobs of the array may run at once")
    extra: Mapping[str, Any] = option({}, "any other option of sbatch: licenses=fluent:1")
    setup: tuple[str, ...] = option((), "shell lines to run first on the first node: 'module load cuda'")
    pre: tuple[str, ...] = option(
        (), "file or directory to copy to each node's own disk before the ranks start"
    )
    pre_to: str = option(
        "$SLURM_TMPDIR", "directory on each node to copy to, for --pre; ranks find it in HEADWAY_STAGED"
    )
    doctor: bool = option(False, "examine the nodes first, and exit with 1 if they would break the run")
    alert: tuple[str, ...] = option(
        (),
        "failed, stopped, finished or all: send an alert at the end, to $HEADWAY_ALERT_URL or $HEADWAY_ALERT_COMMAND",
    )
    env: Mapping[str, str] = option({}, "variables for the ranks")
    signal_lead: int = option(
        120, "seconds before the time limit at which ranks get the signal to save and stop"
    )
    requeue: bool = option(True, "queue the job again when it was stopped with a checkpoint")
    max_requeues: int = option(100, "how many times to queue the job again at most")
    max_attempts: int = option(
        20, "how many starts in a row may end at the time limit without a checkpoint of headway"
    )
    progress: str = option(
        "",
        "where a script keeps checkpoints of its own: a new file there counts as progress at the time limit",
    )
    max_restarts: int = option(0, "restarts on the same nodes after a crash, as long as each made progress")

    def __post_init__(self) -> None:
        self._set("nodes", _nodes(self.nodes))
        _at_least(1, self.ntasks_per_node, "ntasks_per_node")
        _at_least(1, self.cpus_per_task, "cpus_per_task")
        _at_least(1, self.array_limit, "array_limit")
        _at_least(0, self.max_requeues, "max_requeues")
        _at_least(1, self.max_attempts, "max_attempts")
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
            raise UsageError(f"mem={self.mem!r:.80} is not a valid amount of memory; write 64G")
        self._set("setup", _texts(self.setup, "setup"))
        self._set("array", _texts(self.array, "array"))
        self._set("pre", _texts(self.pre, "pre"))
        self._set("alert", _texts(self.alert, "alert"))
        if "silent" in alert_events(self.alert) and "all" not in self.alert:
            raise UsageError(
                "alert: a job does not watch itself for silence; use: headway watch --alert silent"
            )
        for path in self.pre:
            if not Path(path).is_absolute():
                raise UsageError(
                    f"pre: {path!r:.80} must be an absolute path: the job starts in another directory"
                )
        self._check_lead()
        self._check_extra()
        self._check_env()

    @property
    def scheduler(self) -> Scheduler:
        return schedulers.load("slurm")

    @property
    def nproc_per_node(self) -> int:
        """Number of ranks on each node: as many as were asked for, else one per GPU, else one."""
        return self.ntasks_per_node if self.ntasks_per_node is not None else max(1, self.gpus)

    @property
    def gpus(self) -> int:
        """GPUs of each node."""
        match = _GPUS.fullmatch(str(self.gpus_per_node or 0))
        return int(match[1]) if match else 0

    def options(self) -> Mapping[str, Any]:
        """Returns the options of sbatch that do not follow from the request itself."""
        return {
            "gpus-per-node": self.gpus_per_node,
            "cpus-per-task": self.cpus_per_task,
            "mem": self.mem,
            "time": self.time,
            "partition": self.partition,
            "account": self.account,
            "qos": self.qos,
            "constraint": self.constraint,
            "exclusive": self.exclusive,
            **self.extra,
        }

    def _check_lead(self) -> None:
        _at_least(1, self.signal_lead, "signal_lead")
        if self.signal_lead > _LONGEST_LEAD_S:
            raise UsageError(f"signal_lead={self.signal_lead}: SLURM takes at most {_LONGEST_LEAD_S} seconds")
        time_s = None if self.time is None else parse_time_limit(self.time)
        if time_s is not None and time_s <= self.signal_lead:
            raise UsageError(
                f"time={self.time!r} is {time_s} s, but signal_lead={self.signal_lead} s of it are "
                "for saving: ask for more time, or set a shorter signal_lead"
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
            if name in ("cluster", "clusters"):
                raise UsageError(
                    f"extra: --{name}: a job is looked up by its number, and another cluster has its own numbers; "
                    "submit from a login node of that cluster"
                )
            if name in _RESERVED_OPTIONS:
                raise UsageError(f"extra: --{name} is set by headway; leave it out")
            self._check_ranks(name, str(value))
            if not isinstance(value, bool):
                _token(str(value), f"extra: {name}")

    def _check_ranks(self, name: str, value: str) -> None:
        """Refuses an option by which SLURM would give the job GPUs or tasks for which headway starts no ranks."""
        is_gpus = name.startswith("gpus") or (
            name == "gres" and "gpu" in value and self.ntasks_per_node is None
        )
        if is_gpus or name.startswith("ntasks"):
            settings = "--gpus-per-node" if is_gpus else "--nodes and --ntasks-per-node"
            raise UsageError(
                f"extra: --{name}={value:.80} does not say how many ranks each node gets; use {settings} instead"
            )


KINDS: Mapping[str, type[Target]] = {"local": Local, "slurm": Slurm, "mpi": Mpi}


def from_dict(values: Mapping[str, Any]) -> Target:
    """Makes a target from plain values; `kind` names its class: one of `KINDS`, or "module:Class".

    >>> from_dict({"kind": "local", "nproc": 4})
    Local(nproc=4, device='auto', env={})
    """
    kind = str(values.get("kind"))
    if kind in KINDS:
        return KINDS[kind].from_dict(values)
    module, _, name = kind.partition(":")
    try:
        if module.startswith("."):
            raise ImportError("the name is relative")
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(
            f"kind: {kind!r:.80} is not a target; expected {', '.join(KINDS)} or MODULE:CLASS ({error})"
        ) from error
    if not (isinstance(found, type) and issubclass(found, Target)):
        raise UsageError(f"kind: {kind!r:.80} is not a subclass of headway.launcher.targets.Target")
    return found.from_dict(values)


_MOST_VALUES = 100_000


class _SettingsLoader(UniqueKeysLoader):
    """Reads 12:00:00 as text: YAML 1.1 reads the number 43200, which SLURM takes for minutes, a whole month."""

    def resolve(self, kind: type[yaml.Node], value: Any, implicit: Any) -> Any:
        if kind is yaml.ScalarNode and implicit[0] and _BASE_60.fullmatch(value):
            return "tag:yaml.org,2002:str"
        return super().resolve(kind, value, implicit)  # type: ignore[no-untyped-call]


def parse_settings(text: str) -> Any:
    """Returns the plain values of a YAML text, with times as they are written.

    >>> parse_settings("time: 12:00:00")
    {'time': '12:00:00'}
    """
    try:
        values = yaml.load(text, Loader=_SettingsLoader)
    except RecursionError as error:
        raise ConstructorError(None, None, "it is nested too deeply", None) from error
    _check_size(values)
    return values


def _check_size(values: Any) -> None:
    """Raises `ConstructorError` for values that a few aliases make endlessly large."""
    todo = [values]
    for _ in range(_MOST_VALUES):
        if not todo:
            return
        value = todo.pop()
        todo += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    raise ConstructorError(None, None, f"it has more than {_MOST_VALUES:,} values", None)


def read_target(path: Path) -> Target:
    """Reads a target from a YAML file: `kind: slurm`, then its settings."""
    try:
        values = parse_settings(files.read_regular(path, follow=True).decode())
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: not UTF-8, or a date that does not exist
        raise UsageError(f"{path} is not YAML: {yaml_problem(error)}") from error
    if not isinstance(values, dict) or "kind" not in values:
        raise UsageError(
            f"{path} does not say where to run; begin with a line like 'kind: slurm' ({', '.join(KINDS)})"
        )
    try:
        return from_dict(values)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error


def target_fields(kind: type[Target]) -> list[Field[Any]]:
    """Returns the settings of a target, in the order in which people read them."""
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


def _nodes(value: object) -> int | str:
    """Returns a number of nodes, or a range in SLURM's form.

    >>> _nodes(2), _nodes("2"), _nodes("1-4"), _nodes("3-3")
    (2, 2, '1-4', 3)
    """
    match = _NODES.fullmatch(str(value)) if isinstance(value, int | str) else None
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if isinstance(value, bool) or not 1 <= least <= most:
        raise UsageError(
            f"nodes={value!r:.80} must be a whole number of at least 1, or a range such as '1-2'"
        )
    return least if least == most else f"{least}-{most}"


def _token(value: object, name: str) -> None:
    if value is not None and (
        not isinstance(value, str) or not _TOKEN.fullmatch(value) or value.startswith("-")
    ):
        raise UsageError(
            f"{name}={value!r:.80} cannot be passed to SLURM: no spaces, quotes, backslashes, '#' or leading '-'"
        )


def _texts(values: Iterable[str], name: str) -> tuple[str, ...]:
    if isinstance(values, str):
        raise UsageError(f"{name}={values!r:.80} must be a list of strings: [{values!r:.80}]")
    texts = tuple(values)
    for text in texts:
        if not isinstance(text, str) or "\0" in text:
            raise UsageError(f"{name}: {text!r:.80} is not a string")
    return texts


def _mapping(values: object, name: str) -> Mapping[Any, Any]:
    if not isinstance(values, Mapping):
        raise UsageError(
            f"{name}={values!r:.80} must be a mapping of names to values, such as {{'OMP_NUM_THREADS': '4'}}"
        )
    return values
