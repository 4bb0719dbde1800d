"""Who gives us nodes: the interface that every scheduler implements, and SLURM, the one that ships with headway."""
