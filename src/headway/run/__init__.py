"""The run directory: the one owner of every path in it, its lock, which run continues, code state, plain settings.

`paths` names the files, `info` reads and writes run.json, `creation` makes a directory, `directory` holds `Run`. `lock`
lets one process train at a time, `choice` decides which run to train in, `status` says where a run stands, and
`job_record` when its job started and how it ended; `exit_codes` says what its exit code means. `source` asks git about
the code, `plain` turns settings into plain values, and `rebuild` writes a damaged run.json again.
"""

from headway.run.creation import check_name as check_name, config_text as config_text
from headway.run.directory import (
    Run as Run,
    find_latest as find_latest,
    find_runs as find_runs,
    own_runs as own_runs,
    runs_under as runs_under,
)
from headway.run.info import has_info as has_info
from headway.run.paths import step_name as step_name
