"""`headway plan search`: the best layouts of a model on a number of GPUs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from headway.cli.parser import Positional, above_zero, parse, positive
from headway.cli.plan import named_model, named_node, writing
from headway.cli.screen import EscapingConsole, print_json
from headway.errors import DOES_NOT_FIT, DONE, UsageError
from headway.plan.cost.economy import Workload
from headway.plan.model.layout import Layout

if TYPE_CHECKING:
    from headway.plan.input.plan_file import PlanFile
    from headway.plan.report.estimates import Estimate
    from headway.plan.searcher.layouts import Candidate

_YAML = (".yaml", ".yml")
_PATH_FLAGS = ("--save", "--html")


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """Searches for the best layouts of a model, from a plan file or a preset, on a number of GPUs.

    `--schedule`, `--recompute` and `--zero` restrict the search to such layouts. With degrees (`--tp 8`), they are
    settings of the layout that the best one is compared with.
    """

    what: Annotated[str, Positional("FILE.yaml|PRESET|config.json")]
    """a plan file with a section `search`, a preset (headway plan list), or a model's config.json from the Hugging Face
    Hub; the flags below override the file"""
    layout: Layout
    workload: Workload
    gpus: Annotated[int | None, positive] = None
    """GPUs to use; with a plan file, those of its section `search`."""
    node: str = "h200-sxm8"
    """A catalog name (headway plan list) or "this"."""
    price_per_hour: Annotated[float | None, above_zero] = None
    """Price of one node, in your currency."""
    html: Path | None = None
    """Write a self-contained page: time against memory of every layout that fits."""
    save: Path | None = None
    """Write the plan of the fastest layout as JSON: model, layout, node and answers; `pipe.enable_plan` takes it."""
    emit: Literal["submit"] | None = None
    """Print only the `headway submit` line that asks for the nodes of the fastest layout."""
    trainable: bool = False
    """Try only layouts that `headway.train` can run today."""
    json: bool = False
    """Print JSON."""

    def __post_init__(self) -> None:
        if self.json and self.emit is not None:
            raise UsageError("--json prints all layouts: leave out --emit")


def main(argv: list[str]) -> int:
    """Runs `headway plan search`."""
    from headway.plan.input.plan_file import SearchSettings
    from headway.plan.report.tables import print_search
    from headway.plan.searcher.layouts import search

    options = parse(SearchOptions, _with_batch(argv), verb="plan search")
    plan = _search_plan(options, argv)
    layout = plan.layout  # without a section `search`, its numbers of GPUs and samples are searched
    wanted = plan.search or SearchSettings(gpus=layout.gpus, global_batch=layout.global_batch)
    plan = replace(plan, search=wanted)
    given = _given_layout(plan)
    found = search(
        plan.model, plan.node, gpus=wanted.gpus, global_batch=wanted.global_batch, base=layout,
        calibration=plan.calibration, keep=wanted.keep, against=given, trainable=options.trainable,
        only={} if given else _given_flags(options, argv),
    )  # fmt: skip
    if options.html is not None:
        from headway.plan.report.search_page import render_search

        with writing(options.html):
            options.html.write_text(render_search(plan.model.name, found))
    best = _best_estimate(plan, found.best)
    totals = {key: answer for key, answer in best.answers.items() if key.startswith("run.")} if best else {}
    if options.save is not None and best is not None:
        with writing(options.save):
            best.save(options.save)
    if options.emit is not None and best is not None:
        print(best.submit_line(options.save))
    elif options.json:
        values = {key: quantity.to_dict() for key, quantity in totals.items()}
        print_json({**found.to_dict(), "run": values})
    else:
        print_search(found, EscapingConsole())
        for key, quantity in totals.items():
            print(f"{key} = {quantity}")
        for file in filter(None, (options.html, options.save if best else None)):
            print(f"written to {file}")
    return DONE if found.best else DOES_NOT_FIT


def _given_layout(plan: PlanFile) -> Layout | None:
    """The layout of the file or the flags to compare with, if it has the same number of GPUs and samples."""
    layout, wanted = plan.layout, plan.search
    if wanted is None or layout.gpus != wanted.gpus or layout.gpus == 1:
        return None
    return layout if layout.global_batch == wanted.global_batch else None


def _best_estimate(plan: PlanFile, best: Candidate | None) -> Estimate | None:
    """The plan of the best layout, with time and cost of a whole run if its length is given."""
    from headway.plan.report.estimates import estimate

    if best is None:
        return None
    return estimate(plan.model, best.layout, plan.node, workload=plan.workload, calibration=plan.calibration)


def _given_flags(options: SearchOptions, argv: list[str]) -> dict[str, object]:
    """The values of the flags on the command line: a default must not replace a value of the file."""
    # "--" alone ends the flags
    words = {word.split("=")[0] for word in argv if word.startswith("--") and word != "--"}
    names = {word.removeprefix("--").removeprefix("no-").replace("-", "_") for word in words}
    values = {**vars(options.layout), **vars(options.workload), **vars(options)}
    return {name: values[name] for name in names}


def _with_batch(argv: list[str]) -> list[str]:
    """Adds the global batch of a plan file's search or layout, which a layout of the flags must divide."""
    from headway.plan.input.plan_file import read_plan_file

    words = [word for before, word in pairwise(["", *argv]) if before not in _PATH_FLAGS and word[:1] != "-"]
    file = next((word for word in words if Path(word).suffix in _YAML), None)
    if file is None or any(word.startswith("--global-batch") for word in argv):
        return argv
    plan = read_plan_file(file)
    return [f"--global-batch={(plan.search or plan.layout).global_batch}", *argv]


def _search_plan(options: SearchOptions, argv: list[str]) -> PlanFile:
    """Reads the plan file, which flags override, or builds a plan from the preset and the flags."""
    from headway.plan.input.plan_file import (
        PlanFile,
        SearchSettings,
        override,
        read_calibration,
        read_plan_file,
    )

    if Path(options.what).suffix in _YAML:
        return override(read_plan_file(options.what), _given_flags(options, argv))
    model = named_model(options.what)
    if options.gpus is None:
        raise UsageError(
            f"give the number of GPUs: headway plan search {options.what} --gpus 64 --global-batch 512"
        )
    return PlanFile(
        model=model,
        layout=options.layout,
        node=named_node(options.node, options.price_per_hour),
        workload=options.workload,
        calibration=read_calibration(None, Path(), options.node),
        search=SearchSettings(gpus=options.gpus, global_batch=options.layout.global_batch),
    )
