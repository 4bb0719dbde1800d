"""Starts a job whose run directory is ready, and restarts it."""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from headway.errors import UsageError
from headway.interpreter import module_command, module_environment
from headway.launcher.code import snapshot
from headway.launcher.enqueue import check_target, keeping_end, set_end_aside, submit_runs
from headway.launcher.program import JobFile, Program, worker_command
from headway.launcher.targets import ClusterTarget
from headway.run import Run
from headway.system import files
from headway.system.locks import ProcessIdentity
from headway.system.log import install_handler, logger

BACKGROUND: dict[str, subprocess.Popen[bytes]] = {}
"""jobs that this process runs in the background, by the id of their run"""


def in_background(run: Run, cwd: Path) -> None:
    """Starts the job in a process of its own. At its exit, this process waits for the job, which Ctrl-C then stops."""
    run.check_private()
    with files.storage(f"start {run.id}"):
        log = files.open_private(run.job_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            process = subprocess.Popen(
                module_command("headway.launcher.functions.background", str(run.path)),
                env=module_environment(),
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C reaches this process alone, which forwards it at exit
            )
        finally:
            os.close(log)
        if not BACKGROUND:
            atexit.register(_wait_for_all)
        BACKGROUND[run.id] = process
        facts = ProcessIdentity.of(process.pid).to_dict() | {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds")
        }
        files.write_atomic(run.submission_file, json.dumps(facts).encode())


def worker_program(run: Run, target: ClusterTarget, cwd: Path) -> Program:
    """Returns the program that calls a function on the nodes of a cluster."""
    return Program(
        command=worker_command(run),
        nproc=target.nproc_per_node,
        cwd=str(cwd),
        env=target.env,
    )


def restart(
    run: Run,
    *,
    nodes: int | str | None = None,
    arguments: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> None:
    """Restarts a job that is over, in its run directory and with its code; on `nodes` nodes, if given.

    `arguments` change those of the script, and `env` adds variables.
    """
    run.check_private()
    job = JobFile.read(run) if run.job_file.exists() else None
    target = job and job.target.without_array()
    if nodes is not None:
        if target is None or run.call_dir.is_dir():
            raise UsageError(
                f"{run.id} is not a script on a cluster, so its number of nodes is fixed: launch it again"
            )
        target = replace(target, nodes=nodes)  # type: ignore[type-var]
        check_target(target)
    with keeping_end(run):
        with run.lock() as held:
            if held.note:
                logger.warning("%s", held.note)
            set_end_aside(run)
        if job and target:
            submit_runs([run], [job.program.changed(arguments, env or {})], target)
        else:
            in_background(run, snapshot.load(run).start)


def _wait_for_all() -> None:
    running = {name: process for name, process in BACKGROUND.items() if process.poll() is None}
    if running:
        install_handler()  # this process may be a notebook that never called init
        logger.info("waiting for %s; Ctrl-C stops what is running", ", ".join(running))
    try:
        for process in running.values():
            process.wait()
    except KeyboardInterrupt:
        for process in running.values():
            process.send_signal(signal.SIGTERM)
        for process in running.values():
            process.wait()
