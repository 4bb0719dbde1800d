"""The machine: what every other package needs, and nothing that knows about training.

    files         durable writes, private modes           locks       file locks, identity of a process
    jsonlines     the one writer and reader of rows       limits      control groups, CPUs, file systems
    environment   every HEADWAY_ variable                 stores      named objects: a directory, HTTP
    text          sizes, durations, long lists            interval    "10min", "500 steps", "1 epoch"
    log           the logger                              redact      secrets out of what is written
    failpoints    where tests make a process fail

Import the modules: `from headway.system import files`. Nothing here imports torch.
"""
