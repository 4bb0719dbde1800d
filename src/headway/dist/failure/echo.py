"""Echoes: errors that only follow from another rank's exit, such as "connection reset by peer" in a collective.

They never count as the cause. No torch: a node agent judges the tracebacks that its ranks print.
"""

from __future__ import annotations

import re

_LOST_PEER = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|socket (timeout|closed)|timed out (after )?waiting|"
    r"remote process (has terminated|exited)|communicator was aborted|connection was likely closed|"
    r"failed to (recv|send)|recvvalue failed|sendbytes failed",
    re.IGNORECASE,
)
_PROCESS_GROUP = re.compile(r"/gloo/|\bNCCL\b|\bc10d\b")
"""found in plain RuntimeErrors from torch's process group: gloo's begin with the file and line that raised them"""
_GROUP_ERRORS = "torch.distributed."
"""the module of the errors of torch's process group"""


def is_echo(name: str, text: str) -> bool:
    """Whether an error, by the name of its class with the module, and its text, is that of a lost process group.

    A lost connection of anything else, such as an upload, is an error of this rank, whatever the others do.

    >>> is_echo("torch.distributed.DistBackendError", "NCCL error: remote process exited")
    True
    """
    of_group = name.startswith(_GROUP_ERRORS) or (
        name == "RuntimeError" and _PROCESS_GROUP.search(text) is not None
    )
    return of_group and _LOST_PEER.search(text) is not None
