"""Start: get N processes going, here, under SLURM or under MPI, and bring them all down together. No torch at import."""
