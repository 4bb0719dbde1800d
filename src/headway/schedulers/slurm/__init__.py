"""SLURM: job scripts, its command-line programs, its queue, and its refusals in words that help."""
