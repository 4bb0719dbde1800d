"""The machine: utilities for all other packages, independent of training.

    files         durable writes, private modes           locks       file locks, identity of a process
    jsonlines     the one writer and reader of rows       limits      control groups, CPUs, file systems
    environment   every HEADWAY_ variable                 stores      named objects: a directory, HTTP
    text          sizes, durations, long lists            interval    "10min", "500 steps", "1 epoch"
    log           the logger                              redact      removal of secrets from output
    ownership     who could have written a file           retries     reads that are tried again
    failpoints    where tests make a process fail

Import the modules: `from headway.system import files`. Nothing here imports torch.
"""
