"""`headway plan`: estimates memory, time and cost of a run before it starts."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from headway.cli.parser import Positional, above_zero, dispatch, parse, positive, unknown_verb
from headway.cli.screen import EscapingConsole, print_json, safe
from headway.errors import DONE, UsageError
from headway.plan.cost.economy import Workload
from headway.plan.model.layout import Layout
from headway.plan.report.estimates import Estimate
from headway.plan.tracer.settings import TraceSettings

if TYPE_CHECKING:
    from headway.plan.machine.hardware import Node
    from headway.plan.model.transformer import Transformer
    from headway.plan.report.saved_plan import PlanComparison

_File = Annotated[Path, Positional("FILE.yaml")]

_USAGE = """\
usage: headway plan FILE.yaml | preset NAME | search FILE.yaml|NAME | module FILE.py:factory | measure FILE.py:factory
                  | calibrate | check RUN | import-dlcalc OLD.yaml | list

  headway plan run.yaml                         memory, time and cost of a layout
  headway plan preset llama-3.1-8b --node h200-sxm8 --dp 8 --zero 3 --global-batch 16 --microbatch 2
  headway plan search run.yaml                  the best layouts for a number of GPUs
  headway plan search llama-3.1-70b --gpus 64 --global-batch 512 --sequence 8192 --html search.html
  headway plan module train.py:make_model       your own module, traced without a GPU
  headway plan measure train.py:make_model      the same, predicted against measured on the device here
  headway plan calibrate                        measure this machine once (under a minute)
  headway plan check RUN                        a run against its plan.json
  headway plan import-dlcalc old.yaml           a dlcalc file as a plan file
  headway plan list                             presets and nodes

`headway plan VERB --help` explains a verb. Exit codes: 0 fits or is tight, 2 bad input, 3 does not fit.
"""


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """How to print the answers."""

    json: bool = False
    """Print JSON and nothing else."""
    explain: str | None = None
    """Print one answer (time.step), or all answers of a group (memory), with formula and source."""
    html: Path | None = None
    """Write a self-contained page."""
    save: Path | None = None
    """Write the plan as JSON: model, layout, node and answers; `pipe.enable_plan` takes it."""
    sps: Annotated[float | None, above_zero] = None
    """Samples per second that a run reached: print its MFU, and its tokens per second and day, instead of the plan."""
    timeline: bool = False
    """Print only the pipeline schedule of one step: a line per pipeline rank."""
    emit: Literal["submit"] | None = None
    """Print only the `headway submit` line that asks for the nodes of this plan."""

    def __post_init__(self) -> None:
        if self.json and (self.timeline or self.emit is not None or self.explain is not None):
            raise UsageError("--json prints all answers: leave out --explain, --timeline and --emit")


@dataclass(frozen=True, kw_only=True)
class FileOptions(OutputOptions):
    """Estimates memory, time and cost of the layout in a plan file."""

    file: _File


@dataclass(frozen=True, kw_only=True)
class PresetOptions(OutputOptions):
    """Estimates memory, time and cost of a well-known model; flags are the keys of a plan file."""

    name: Annotated[str, Positional("NAME")]
    """a preset (headway plan list), or a model's config.json from the Hugging Face Hub"""
    layout: Layout
    workload: Workload
    node: str = "h200-sxm8"
    """A catalog name (headway plan list) or "this"."""
    price_per_hour: Annotated[float | None, above_zero] = None
    """Price of one node, in your currency."""


@dataclass(frozen=True, kw_only=True)
class ModuleOptions(OutputOptions):
    """Estimates memory and time of your own module, which is traced without a GPU."""

    trace: TraceSettings
    node: str = "h200-sxm1"
    """A catalog name (headway plan list) or "this"."""
    calibration: str | None = None
    """A file that `headway plan calibrate` wrote, or "this"."""
    extrapolate: str | None = None
    """Trace the factory with this argument set to 2 and to 4, and extrapolate to the number given: layers=96."""


@dataclass(frozen=True, kw_only=True)
class MeasureOptions:
    """Runs a few real steps on this machine's device, and compares them with the prediction."""

    trace: TraceSettings
    also: Annotated[tuple[int, ...], positive] = ()
    """Further batch sizes, which test what --batch-size has calibrated."""
    steps: Annotated[int, positive] = 10
    """Timed steps of each batch size, at least; on a GPU, as many as fit into a second."""
    save: Path | None = None
    """Write the fitted constants, for `headway plan module --calibration FILE`."""
    node: str | None = None
    """A catalog name (headway plan list), if the driver's name of the device is not in the catalog."""
    calibration: str | None = None
    """A file that `headway plan calibrate` wrote, or "this"."""
    json: bool = False
    """Print JSON and nothing else."""


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions:
    """Measures this machine once: products, copies, attention, launches, transfers, storage, collectives."""

    file: Path | None = None
    """Where to write; ~/.headway/machine.yaml if not given."""
    storage: Path | None = None
    """A directory on the file system that checkpoints go to."""
    loader: str | None = None
    """FILE.py:function that returns your loader; its bandwidth is measured for five seconds, for job.loader_MBps."""
    json: bool = False
    """Print JSON and nothing else."""


@dataclass(frozen=True, kw_only=True)
class PlanCheckOptions:
    """Compares a run with its plan.json; exit code 1 if something is outside its interval."""

    run: Annotated[str, Positional("RUN")]
    """a run directory, or the beginning or end of a run's id"""
    root: str = "runs"
    """Where runs are."""
    json: bool = False
    """Print JSON and nothing else."""


@dataclass(frozen=True, kw_only=True)
class PlanListOptions:
    """Lists the presets and nodes that a plan may name."""

    json: bool = False
    """Print JSON and nothing else."""


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """Prints a dlcalc 3dtrn file as a plan file."""

    file: _File


def main(argv: list[str]) -> int:
    verbs = {
        "preset": _preset, "search": _search, "module": _module, "measure": _measure, "calibrate": _calibrate,
        "import-dlcalc": _import_dlcalc, "check": _check, "list": _list,
    }  # fmt: skip
    if not argv or argv[0] in {"-h", "--help", *verbs}:
        return dispatch("plan", verbs, _USAGE, argv)
    if not (argv[0].startswith("-") or "." in Path(argv[0]).name or Path(argv[0]).exists()):
        raise unknown_verb(argv[0], verbs, "plan", kind="verb or file")
    return _file(argv)


def _file(argv: list[str]) -> int:
    from headway.plan.input.plan_file import read_plan_file
    from headway.plan.report.estimates import estimate

    options = parse(FileOptions, argv, verb="plan")
    plan = read_plan_file(options.file)
    found = estimate(plan.model, plan.layout, plan.node, workload=plan.workload, calibration=plan.calibration)
    return _print(found, options)


def _preset(argv: list[str]) -> int:
    from headway.plan.input.plan_file import read_calibration
    from headway.plan.report.estimates import estimate

    options = parse(PresetOptions, argv, verb="plan preset")
    node = named_node(options.node, options.price_per_hour)
    constants = read_calibration(None, Path(), options.node)
    found = estimate(
        named_model(options.name), options.layout, node, workload=options.workload, calibration=constants
    )
    return _print(found, options)


def named_node(name: str, price_per_hour: float | None) -> Node:
    """Returns the node that a flag names, with its price."""
    from headway.plan.input.plan_file import read_node

    node = read_node(name)
    return node if price_per_hour is None else node.with_price(price_per_hour)


def named_model(name: str) -> Transformer:
    """Returns a preset, or the model of a config.json."""
    from headway.plan.model.hugging_face import from_hf_config
    from headway.plan.model.presets import preset

    return from_hf_config(Path(name)) if Path(name).suffix == ".json" else preset(name)


def _search(argv: list[str]) -> int:
    from headway.cli.plan_search import main

    return main(argv)


def _import_dlcalc(argv: list[str]) -> int:
    import yaml

    from headway.plan.input.dlcalc import approximations, import_dlcalc
    from headway.plan.yaml_reader import read_yaml

    options = parse(ImportOptions, argv, verb="plan import-dlcalc")
    old = read_yaml(options.file)
    plan = import_dlcalc(old)
    for sentence in approximations(old):
        print(f"# {sentence}")
    print(yaml.safe_dump(plan, sort_keys=False), end="")
    return 0


def _check(argv: list[str]) -> int:
    from headway.watch.planned import compare_with_plan
    from headway.watch.runs import resolve

    options = parse(PlanCheckOptions, argv, verb="plan check")
    runs = resolve([options.run], options.root)
    found: list[tuple[str, list[PlanComparison], str]] = []
    for run in runs:
        try:
            found.append((run.id, compare_with_plan(run), ""))
        except UsageError as error:
            found.append((run.id, [], str(error)))
    if not any(rows for _, rows, _ in found):
        raise UsageError(found[0][2])
    if options.json:
        print_json(
            [
                {"run": name} | facts
                for name, rows, problem in found
                for facts in ([row.to_dict() for row in rows] or [{"problem": problem}])
            ]
        )
    else:
        for name, rows, problem in found:
            for text in [*map(_compared, rows)] or [problem]:
                print(safe(f"{name}: {text}" if len(runs) > 1 else text))
    return 1 if any(row.differs for _, rows, _ in found for row in rows) else DONE


def _compared(row: PlanComparison) -> str:
    if row.measured is None:
        return f"{row.what}: planned, not measured"
    return f"{row.planned.sentence(row.what, row.measured)}: {'differs' if row.differs else 'as planned'}"


def _list(argv: list[str]) -> int:
    from headway.plan.machine.hardware import Node, node_names
    from headway.plan.model.presets import preset_names

    options = parse(PlanListOptions, argv, verb="plan list")
    nodes = [Node(name) for name in node_names()]
    if options.json:
        rows = [{"name": n.name, "gpus": n.gpus, "device": n.device.name, "is": n.describe()} for n in nodes]
        print_json({"presets": preset_names(), "nodes": rows})
        return 0
    print("presets:", *preset_names(), sep="\n  ")
    print("nodes:", *(f"{n.name:<15} {n.describe()}" for n in nodes), sep="\n  ")
    return 0


def _module(argv: list[str]) -> int:
    from headway.plan.input.plan_file import read_calibration, read_node
    from headway.plan.tracer.request import estimate_module

    options = parse(ModuleOptions, _with_factory(argv, "module"), verb="plan module")
    constants = read_calibration(options.calibration, Path(), options.node)
    found = estimate_module(
        options.trace,
        node=read_node(options.node),
        calibration=constants,
        extrapolate=_depth(options.extrapolate),
    )
    return _print(found, options)


def _with_factory(argv: list[str], verb: str) -> list[str]:
    """Adds the flag of the factory if the factory comes first, without it."""
    if argv and not argv[0].startswith("-"):
        return ["--factory", *argv]
    if not any(word in ("-h", "--help") or word.split("=")[0] == "--factory" for word in argv):
        raise UsageError(
            f"give the function that returns your module first: headway plan {verb} FILE.py:function"
        )
    return argv


def _depth(given: str | None) -> tuple[str, int] | None:
    if given is None:
        return None
    name, _, number = given.partition("=")
    if not name.isidentifier() or not re.fullmatch(r"[1-9][0-9]{0,8}", number):
        raise UsageError(
            f"--extrapolate is {given!r:.80}; expected the factory's argument and a number: layers=96"
        )
    return name, int(number)


def _measure(argv: list[str]) -> int:
    from headway.plan.input.plan_file import read_calibration, read_node
    from headway.plan.machine.calibration import save_calibration
    from headway.plan.tracer.measurement import measure_module
    from headway.plan.tracer.measurement_table import print_measurement

    options = parse(MeasureOptions, _with_factory(argv, "measure"), verb="plan measure")
    node = None if options.node is None else read_node(options.node)
    constants = read_calibration(options.calibration, Path(), options.node)
    found = measure_module(
        options.trace, also=options.also, node=node, calibration=constants, steps=options.steps
    )
    if options.save is not None:
        with writing(options.save):
            save_calibration(
                options.save,
                found.calibration,
                facts={"device": found.device, "rows": found.to_dict()["rows"]},
            )
    if options.json:
        print_json(found.to_dict())
    else:
        print_measurement(found, EscapingConsole())
    return 0


def _calibrate(argv: list[str]) -> int:
    from headway.plan.machine.calibration import calibration_file, save_calibration
    from headway.plan.tracer.measurement import calibrate

    options = parse(CalibrateOptions, argv, verb="plan calibrate")
    node, constants, facts = calibrate(directory=options.storage, loader=options.loader)
    file = options.file or calibration_file()
    with writing(file):
        save_calibration(file, constants, node=node, facts=facts)
    if options.json:
        print_json({"file": str(file), "node": node, "calibration": vars(constants), "measured": facts})
    else:
        print(file.read_text(), end="")
        print(f"written to {file}; plans use it with node: this")
    return 0


@contextmanager
def writing(file: Path) -> Iterator[None]:
    """Reports an error while a file is written in one sentence."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error.strerror}; choose another path") from error


def _print(plan: Estimate, options: OutputOptions) -> int:
    if options.html is not None:
        from headway.plan.report.html import render_page

        with writing(options.html):
            options.html.write_text(render_page(plan))
    if options.save is not None:
        with writing(options.save):
            plan.save(options.save)
    if options.sps is not None:
        reached = plan.at_rate(options.sps)
        if options.json:
            print_json(reached)
        else:
            print("\n".join(f"{k} = {v:.4g}" for k, v in reached.items()))
        used = min((share for key, share in reached.items() if key.startswith("mfu")), default=0.0)
        if used > 1:
            print(
                f"--sps {options.sps:g} is {used:.0%} of what the devices can do; "
                "expected samples per second of all GPUs together, and the model and node that ran",
                file=sys.stderr,
            )
    elif options.timeline:
        from headway.plan.report.schedule_picture import schedule_text

        print(schedule_text(plan, EscapingConsole().width))
    elif options.emit is not None:
        print(plan.submit_line(options.save))
    elif options.explain is not None:
        print(plan.explain(options.explain))
    elif options.json:
        print_json(plan.to_dict())
    else:
        from headway.plan.report.tables import print_estimate

        print_estimate(plan, EscapingConsole())
        for file in filter(None, (options.save, options.html)):
            print(f"written to {file}")
    return plan.exit_code
