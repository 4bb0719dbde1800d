"""The control plane: a hub in rank 0's process with one signed connection per rank, agreement on stops, signals."""
