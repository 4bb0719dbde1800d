"""Resuming: what a run saves, when it saves, and how it restores its state exactly.

`checkpointer` decides when to save and where all ranks stop, and restores the newest checkpoint. `state` is the state
of a pipeline under names that do not depend on ranks or wrappers, `rng` that of the random number generators.
`attempts` detects a run that makes no progress, and `ledger_writer` records every step, so that two runs can be
compared.
"""
