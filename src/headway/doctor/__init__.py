"""Is this machine fit to train? `examine` runs all checks and returns a `MachineReport` (`headway doctor` prints it).

`checks` has the verdicts, `probes` the facts behind them, `canary` the job that tests links. For several nodes of a
cluster, `examination` is what its ranks do, `cluster` has the verdicts, `job` submits it. Imports no torch.
"""
