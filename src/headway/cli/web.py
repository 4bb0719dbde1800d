"""`headway web`: runs in a browser."""

from __future__ import annotations

import json
import sys

from headway.cli.parser import Parser, natural
from headway.cli.screen import safe
from headway.cli.watch import is_root, list_watched, root_at
from headway.errors import DONE, UsageError
from headway.system.text import plural
from headway.watch.web import RunLibrary, listen, serve
from headway.watch.web.run_library import key_of

_MAX_PORT = 65_535
_EXAMPLES = """\
examples:
  headway web                                all runs in runs/
  headway web x7k2                           a run by the end of its id
  headway web /scratch/me/runs --port 8265   all runs there, on a port that you choose

It listens on 127.0.0.1 only, and prints a URL with a token, which every request needs; and the `ssh -L` command to run
on your own machine if this is another one. It only reads run directories, so training is not affected. Ctrl-C ends it.
"""


def main(argv: list[str]) -> int:
    parser = Parser("web", "Shows runs in a browser: live curves, ranks, settings, logs, sweeps.", _EXAMPLES)
    parser.add_run(nargs="?", metavar="RUN|ROOT", more=", or a directory of runs")
    parser.add_argument(
        "--port", type=natural, default=0, metavar="N", help="port to listen on (default: a free port)"
    )
    parser.add_argument("--json", action="store_true", help="print the address as JSON, then serve")
    options = parser.parse_args(argv)
    if options.port > _MAX_PORT:
        raise UsageError(f"--port {options.port} is not a valid port; the largest is {_MAX_PORT}")
    library, first, what = _library(options.run, options.root)
    address = listen(options.port)
    url, tunnel = address.url(first), address.ssh_command()
    if options.json:
        print(json.dumps({"url": url, "port": address.port, "ssh": tunnel}), flush=True)
    else:
        print(f"{safe(what)}:\n\n  {url}\n")  # another user may have written the id
        print(f"on another machine, run this first, and open the same address:\n\n  {tunnel}\n")
        print("Ctrl-C ends this, and does not affect training", flush=True)
    try:
        serve(address, library)
    except KeyboardInterrupt:
        print(file=sys.stderr)
    return DONE


def _library(place: str | None, root: str) -> tuple[RunLibrary, str | None, str]:
    """Returns the runs to show, the key of the one to open first, and what to call them."""
    if is_root(place):
        directory = root_at(place, root)
        library = RunLibrary(root=directory.absolute())
        return library, None, f"{plural(len(library.runs()), 'run')} in {directory}"
    runs = list_watched(place, root)
    first = key_of(runs[0]) if len(runs) == 1 else None
    return RunLibrary(runs=runs), first, runs[0].id if first else f"{plural(len(runs), 'run')} of a sweep"
