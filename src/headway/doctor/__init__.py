"""Checks whether this machine is fit to train: `examine` runs all checks and returns a `MachineReport`.

`checks` has the verdicts, `probes` collects facts, `canary` is the program that tests links. For nodes of a cluster,
`job` submits a job, `examination` is the program of its ranks, and `cluster` has the verdicts. Imports no torch.
"""
