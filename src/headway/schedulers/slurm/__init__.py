"""SLURM: job scripts, its command-line programs, its queue, and its refusals in words that help.

`scheduler.SlurmScheduler` implements the interface; `client.SlurmClient` is the only place that runs a program of
SLURM. `time_limit` reads SLURM's notation of times.
"""
