"""The machine and its links: GPUs, NVLink, InfiniBand and network interfaces, and whether every link works.

`machine` and `nvml` read facts without torch, `nccl` turns them into the few settings that a job needs, and
`interconnect` measures every link between the ranks of a group; `clocks` compares the clocks of their nodes.
"""
