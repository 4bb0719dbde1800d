"""What it costs: memory, FLOPs, compute and communication time, pipeline schedule, economy of the run."""
