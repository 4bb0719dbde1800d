"""Compares a run with its plan.json."""

from __future__ import annotations

from headway.errors import UsageError
from headway.plan.report.saved_plan import PlanComparison, read_saved_plan
from headway.run import Run
from headway.watch.view import RunView


def compare_with_plan(run: Run) -> list[PlanComparison]:
    """Compares the median step time and the peak memory of a run with its plan.json.

    Raises `UsageError` if neither can be compared.
    """
    if not run.plan_file.exists():
        raise UsageError(
            f"{run.path} has no plan.json; save one with `headway plan ... --save plan.json`, and give it to the run "
            'with pipe.enable_plan("plan.json")'
        )
    read_saved_plan(run.plan_file)  # raises if it is not a plan
    found = list(RunView(run, thorough=True).refresh().plan)
    if not found:
        raise UsageError(
            f"{run.path} cannot be compared with its plan, which has neither step time nor memory"
        )
    if all(row.measured is None for row in found):
        raise UsageError(
            f"{run.path} cannot be compared with its plan: the run has not measured "
            f"{' or '.join(row.what for row in found)}; see what it has: headway watch {run.path} --once"
        )
    return found
