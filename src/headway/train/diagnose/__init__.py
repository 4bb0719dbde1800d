"""Diagnosis of failed training, and smoke runs.

`evidence` collects facts when a rank runs out of memory or a loss becomes non-finite: the phase, the batch, the module
and the samples. `smoke` reduces a run to a few batches of everything, for `headway run --smoke`.
"""
