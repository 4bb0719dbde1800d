"""Saving a checkpoint, top to bottom: `saver` (the only entry point), `planner` (which rank writes what), `background`
with `host_memory` (copy, so that training can continue), `writer` (every rank writes, rank 0 commits), `writer_process`
(a process without torch) and `disk` (files, checksums, fsync, rename).
"""
