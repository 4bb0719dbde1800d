"""Start: get N processes going, here, under SLURM or under MPI, and end them together. No torch at import."""
