"""The run directory: the one owner of every path in it, its lock, which run continues, code state, plain settings."""

from headway.run.directory import (
    Run as Run,
    check_name as check_name,
    config_text as config_text,
    find_latest as find_latest,
    runs_under as runs_under,
    step_name as step_name,
)
