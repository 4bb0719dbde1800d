"""Metrics of training: collected on the device, reduced over ranks at log points, recorded and shown.

`meter` accumulates values and reduces them with one collective per log point; `history` keeps the results in memory.
`timing` measures the phases of a step and `stragglers` compares them between ranks. `reporter` writes the rows of the
metrics files and updates the `display`, a table on a terminal or lines elsewhere. `bad_samples` counts the bad samples
of loaders, and `epoch_metrics` computes metrics that are not means.
"""
