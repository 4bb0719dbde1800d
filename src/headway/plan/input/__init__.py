"""What people write: plan files in YAML, and dlcalc files, which are converted to plan files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway import lazy

if TYPE_CHECKING:
    from headway.plan.input.dlcalc import import_dlcalc as import_dlcalc
    from headway.plan.input.plan_file import (
        PlanFile as PlanFile,
        parse_plan as parse_plan,
        read_calibration as read_calibration,
        read_node as read_node,
        read_plan_file as read_plan_file,
    )

__getattr__, __dir__, __all__ = lazy.exports(__name__)
