"""Learning rates as metrics: `lr/NAME` of each optimizer, recorded at log points."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.optim import Optimizer

from headway.train.metrics.meter import MetricAccumulator


def log_learning_rates(
    name: str, optimizer: Optimizer, meter: MetricAccumulator, *, used: Sequence[float | Tensor | None] = ()
) -> None:
    """Logs the learning rate of an optimizer: `lr/NAME`, or `lr/NAME/GROUP` if it has several parameter groups.

    GROUP is the number of the group, or its "name" if all groups have one. A value that the user has logged under that
    name is kept. `used` are the rates of the last step, by group, if a scheduler has changed them since.
    """
    groups = optimizer.param_groups
    names = [str(group.get("name", number)) for number, group in enumerate(groups)]
    if len(set(names)) < len(names):
        names = [str(number) for number in range(len(groups))]
    rates = used if len(used) == len(groups) else [group.get("lr") for group in groups]
    for part, rate in zip(names, rates, strict=True):
        full = f"lr/{name}" if len(groups) == 1 else f"lr/{name}/{part}"
        if rate is not None and not meter.has_logged(full):
            meter.log(full, rate, reduce="last")
