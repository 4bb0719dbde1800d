"""The run directory: its paths, its lock, its records, and the choice of the run to train in.

`paths` names the files, `info` reads and writes run.json, `creation` makes a directory, `directory` has `Run`. `lock`
lets one process train at a time, `choice` decides which run to train in, `status` reports the state of a run,
`job_record` records when its job started and ended, and `exit_codes` explains its exit code. `source` reads the state
of the code from git, `plain` converts settings to plain values, and `rebuild` restores a damaged run.json.
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
