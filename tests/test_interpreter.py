"""Further processes import the headway of the process that starts them, and nothing from the current directory."""

from __future__ import annotations

import os
import site
import subprocess
from pathlib import Path

import pytest
from waiting import wait_until

import headway
from headway.interpreter import module_command, module_environment
from headway.record.attempt import run_report_command
from headway.record.devices import sampling_devices
from headway.record.sinks import Csv, feeding
from headway.run import Run
from headway.system.jsonlines import read

HOME = str(Path(headway.__file__).parents[1])


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, in which another user has made a module of the name of one in the standard library."""
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "json.py").write_text(f"open({str(shared / 'executed')!r}, 'w')\nraise SystemExit(9)\n")
    monkeypatch.chdir(shared)
    return shared


def test_modules_of_others_are_not_imported(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_SAMPLE_EVERY", "0.01")
    run = Run.create(shared.parent / "runs", name="digits")
    run_report_command(run)
    with sampling_devices(run, host="cn1", delay_s=0), feeding(run, [Csv()], finish_s=60):
        wait_until(
            lambda: (shared / "executed").exists() or list(read(run.node_file("cn1"))), "a sample is written"
        )
    assert not (shared / "executed").exists()


def test_a_process_finds_headway_where_this_one_has(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site, "getsitepackages", lambda: ["/opt/lib/python3/site-packages"])
    assert module_environment({"A": "b"}) == {"A": "b", "PYTHONPATH": HOME}
    environ = module_environment(os.environ | {"PYTHONPATH": "/opt/mine"})
    assert environ["PYTHONPATH"] == f"{HOME}{os.pathsep}/opt/mine"
    command = module_command("headway", "--version")
    version = subprocess.run(command, env=environ, cwd=shared, capture_output=True, text=True, check=True)
    assert headway.__version__ in version.stdout
    monkeypatch.setattr(site, "getsitepackages", lambda: [HOME])
    assert module_environment({"PYTHONPATH": "/opt/mine"}) == {"PYTHONPATH": "/opt/mine"}
