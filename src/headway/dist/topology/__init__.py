"""What connects the ranks: GPUs and their links, network interfaces, NCCL settings, and a check of every link."""
