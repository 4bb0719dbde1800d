"""`headway data stage`: copies data to a node's own disk."""

from __future__ import annotations

from headway.cli.parser import Parser
from headway.cli.screen import print_json
from headway.data.cache.staging import stage
from headway.errors import DONE
from headway.system.text import format_bytes

_EXAMPLES = """\
examples:
  headway data stage /datasets/imagenet /datasets/labels.csv      into $SLURM_TMPDIR
  headway data stage --tmp /scratch/me /datasets/imagenet
  srun --ntasks-per-node=1 headway data stage /datasets/imagenet  on each node of a job

A second call copies only what is missing. Of many calls at once, one copies and the others wait.
For a job that headway submits: headway submit --pre /datasets/imagenet ...
"""


def main(argv: list[str]) -> int:
    parser = Parser(
        "data stage", "Copies files and directories to a node's own disk, once per node.", _EXAMPLES
    )
    parser.add_argument("sources", metavar="SOURCE", nargs="+", help="file or directory; links are followed")
    parser.add_argument("--tmp", metavar="DIR", help="where to copy (default: $SLURM_TMPDIR)")
    parser.add_json()
    options = parser.parse_args(argv)
    staged = stage(options.sources, options.tmp)
    if options.json:
        facts = {"files": staged.files, "bytes": staged.bytes, "copied": staged.copied}
        print_json({"paths": [str(path) for path in staged.paths], **facts})
        return DONE
    for path in staged.paths:
        print(path)
    print(
        f"{staged.files} files, {format_bytes(staged.bytes)}, of which {format_bytes(staged.copied)} were copied now"
    )
    return DONE
