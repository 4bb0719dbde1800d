"""Reads plan files: YAML with model, layout, node, and the run around them.

model: llama-3.1-8b            # a preset, {hf: config.json}, or the numbers of a Transformer
layout: {dp: 8, zero: 3, microbatch: 2, global_batch: 16, sequence: 8192, precision: amp}
node: h200-sxm8                # a catalog name, "this", or {device: ..., gpus: ..., inter_Gbps: ...}
job: {tokens: 1.0e12}
search: {gpus: 64, global_batch: 1024}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from math import prod
from pathlib import Path
from typing import Any, TypeVar

from headway.errors import UsageError
from headway.plan import checks
from headway.plan.cost.economy import Workload
from headway.plan.machine.calibration import Calibration, calibration_file, load_calibration
from headway.plan.machine.hardware import Node
from headway.plan.model.hugging_face import from_hf_config
from headway.plan.model.layout import MOST_GPUS, Layout
from headway.plan.model.presets import preset
from headway.plan.model.transformer import Encoder, Image, Mla, Moe, StateSpace, Transformer
from headway.plan.yaml_reader import read_yaml

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class SearchSettings:
    """The section `search` of a plan file."""

    gpus: int
    global_batch: int
    keep: int = 20

    def __post_init__(self) -> None:
        checks.require_int("search.gpus", self.gpus, at_most=MOST_GPUS)
        for key in ("global_batch", "keep"):
            checks.require_int(f"search.{key}", getattr(self, key))


@dataclass(frozen=True, kw_only=True)
class PlanFile:
    """A plan file, parsed and checked."""

    model: Transformer
    layout: Layout
    node: Node
    workload: Workload
    calibration: Calibration | None
    search: SearchSettings | None = None


_DEGREES = ("dp", "tp", "pp", "vpp", "cp", "ep", "microbatch")


def override(plan: PlanFile, given: Mapping[str, object]) -> PlanFile:
    """Returns the plan of a file with the flags of a command line applied: keys of layout, job, search and node.

    `global_batch` applies to the search. The layout of the file keeps its own, unless a degree is given: the search
    compares the two only if their batches are equal.
    """
    layout: dict[str, Any] = {f.name: given[f.name] for f in fields(Layout) if f.name in given}
    job: dict[str, Any] = {f.name: given[f.name] for f in fields(Workload) if f.name in given}
    batch = layout.pop("global_batch", None)
    search, node, calibration = plan.search, plan.node, plan.calibration
    if search is not None or "gpus" in given or batch is not None:
        # without a section `search`, the GPUs of the layout are searched
        own = prod(layout.get(key, getattr(plan.layout, key)) for key in ("dp", "tp", "pp", "cp"))
        search = SearchSettings(
            gpus=given.get("gpus", search.gpus if search else own),  # type: ignore[arg-type]
            global_batch=batch or (search or plan.layout).global_batch,
            keep=search.keep if search else 20,
        )
    if search is not None and not layout.keys().isdisjoint(_DEGREES):
        layout["global_batch"] = search.global_batch
    if "node" in given:
        node = read_node(given["node"])
        calibration = calibration or read_calibration(None, Path(), given["node"])
    if "price_per_hour" in given:
        node = node.with_price(given["price_per_hour"])
    return replace(
        plan,
        layout=replace(plan.layout, **layout),
        workload=replace(plan.workload, **job),
        node=node,
        search=search,
        calibration=calibration,
    )


def read_plan_file(path: str | Path) -> PlanFile:
    """Reads and checks a plan file."""
    return parse_plan(read_yaml(path), where=str(path), directory=Path(path).parent)


def parse_plan(
    data: Mapping[str, object], *, where: str = "the plan", directory: Path | None = None
) -> PlanFile:
    """Checks the mapping of a plan file. Paths in it are relative to `directory`."""
    checks.require_known_keys(where, data, ("model", "layout", "node", "job", "search", "calibration"))
    for key in ("model", "node"):
        if key not in data:
            raise UsageError(f"{where} has no {key!r}; a plan needs model and node, and layout or search")
    directory = directory or Path()
    wanted = data.get("search")
    return PlanFile(
        model=read_model(data["model"], directory),
        layout=build(Layout, "layout", data.get("layout", {})),
        node=read_node(data["node"]),
        workload=build(Workload, "job", data.get("job", {})),
        calibration=read_calibration(data.get("calibration"), directory, data["node"]),
        search=None if wanted is None else build(SearchSettings, "search", wanted),
    )


def read_model(given: object, directory: Path) -> Transformer:
    """Reads a model: a preset's name, a preset with changes, a Hugging Face config, or numbers."""
    if isinstance(given, str):
        return preset(given)
    keys = dict(checks.require_mapping("model", given))
    if "hf" in keys:
        base = from_hf_config(directory / str(keys.pop("hf")))
    elif "preset" in keys:
        base = preset(str(keys.pop("preset")))
    else:
        return build(Transformer, "model", _with_parts(keys))
    checks.require_known_keys("model", keys, [field.name for field in fields(Transformer)])
    return replace(base, **_with_parts(keys)) if keys else base


def read_node(given: object) -> Node:
    """Reads a node: a catalog name, "this" (measured by `headway plan calibrate`), or a mapping."""
    if given == "this":
        file = calibration_file()
        if not file.is_file():
            raise UsageError(f"node is 'this', but {file} does not exist; run: headway plan calibrate")
        return read_node(read_yaml(file, what="a calibration file").get("node"))
    if isinstance(given, str):
        return Node(given)
    keys = dict(checks.require_mapping("node", given))
    price, name = keys.pop("price_per_hour", None), keys.pop("name", None)
    if name is not None and "device" not in keys:
        checks.require_known_keys("node", keys, ("device",))
        node = Node(str(name))
    else:
        node = Node.of(name=str(name or "mine"), **keys)  # type: ignore[arg-type]
    return node if price is None else node.with_price(price)


def read_calibration(given: object, directory: Path, node: object) -> Calibration | None:
    """Reads constants from a file or from the plan; without either, this machine's if the node is "this"."""
    if given is None:
        return load_calibration(calibration_file()) if node == "this" else None
    if isinstance(given, str):
        return load_calibration(calibration_file() if given == "this" else directory / given)
    return build(Calibration, "calibration", given)


def build(cls: type[T], where: str, given: object) -> T:
    """Builds a settings dataclass from a mapping, and refuses unknown and missing keys."""
    keys = dict(checks.require_mapping(where, given))
    every = fields(cls)  # type: ignore[arg-type]
    checks.require_known_keys(where, keys, [field.name for field in every])
    required = [f.name for f in every if f.default is MISSING and f.default_factory is MISSING]
    for name in required:
        if name not in keys:
            raise UsageError(f"{where} has no {name!r}; it needs {checks.listed(required)}")
    return cls(**keys)


def _with_parts(keys: dict[str, object]) -> dict[str, Any]:
    """Replaces the nested sections of a model by their dataclasses. Its name is text, even if YAML reads a date."""
    parts: dict[str, type] = {
        "moe": Moe, "mla": Mla, "image": Image, "state_space": StateSpace, "encoder": Encoder
    }  # fmt: skip
    built = {
        key: build(parts[key], f"model.{key}", value) if key in parts and value is not None else value
        for key, value in keys.items()
    }
    if "name" in built:
        built["name"] = str(built["name"])
    return built
