"""A secret that the environment, settings, command or code hold is in no file of the run."""

from __future__ import annotations

import os
import string
import subprocess
import tempfile
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, example, given, settings, strategies as st

from headway.run import Run

# What occurs in keys and passwords; shorter ones would be in a file by accident. No run says "~".
secrets = st.text(
    st.sampled_from(string.ascii_letters + string.digits + "!#$%()*+,-./:;<=>?@[]^_{|} é"), min_size=8
).map(lambda text: f"q~{text.strip()}~q")


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("project")
    (path / "train.py").write_text("")
    for command in ("init -q", "add .", "-c user.name=me -c user.email=me@x commit -qm first"):
        subprocess.run(["git", *command.split()], cwd=path, check=True)
    return path


def _contents(run: Run) -> str:
    paths = [path for path in run.path.rglob("*") if path.is_file()]
    assert len(paths) > 4
    return "\n".join(path.read_text() for path in paths)


def _run(root: str, *, config: object = None, command: tuple[str, ...] = (), failure: str = "") -> Run:
    run = Run.create(root, config=config, command=["train.py", *command], world={"note": failure})
    with run.lock():
        run.begin_attempt(world={"note": failure})
        run.write_failure({"rank": 0, "traceback": failure})
        run.begin_attempt(world={})
    return run


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(secret=secrets)
@example(secret="q~--begins-like-an-option~q")
@example(secret="q~none~q")
@example(secret="q~of several words~q")
def test_no_file_holds_a_named_secret(secret: str, repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(repository)
    quoted = quote(secret, safe="!$&'()*+,;=:")
    (repository / "train.py").write_text(
        f'+api_key = "{secret}"\nTOKEN: str = {secret!r}\nurl = "ftp://me:{quoted}@host/"\n'
    )
    with tempfile.TemporaryDirectory() as root:
        run = _run(
            root,
            config={
                "api_key": secret,
                "tracker": {"password": secret, "url": f"https://me:{quoted}@host/x"},
                "nested": [{"hf_token": secret}, {"credentials": {"login": secret, "list": [secret]}}],
                "call": ["curl", "--token", secret],
                "json": f'{{"secret": "{secret}"}}',
            },
            command=(
                "--api-key",
                secret,
                f"--token={secret}",
                f"db.password={secret}",
                f"https://{quoted}@host",
            ),
            failure=f'ConnectionError: could not log in at https://me:{quoted}@host with password="{secret}"',
        )
        text = _contents(run)
    assert "[redacted]" in text
    assert "q~" not in text and "~q" not in text


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(secret=secrets)
def test_no_file_holds_the_value_of_a_secret_variable(
    secret: str, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it turns up: under innocent names, in the middle of text, in file names."""
    monkeypatch.chdir(repository)
    monkeypatch.setenv("SOME_TOKEN", secret)
    (repository / "train.py").write_text(f"# {secret}\n")
    untracked = repository / secret.replace("/", "")
    if untracked.name == secret:
        untracked.touch()
    with tempfile.TemporaryDirectory() as root:
        run = _run(
            root,
            config={"innocent": secret, "list": [f"a{secret}b"], secret: 1},
            command=(secret, f"x{secret}y", f"--name={secret}"),
            failure=f"KeyError: {secret!s}",
        )
        text = _contents(run)
    if untracked.exists():
        untracked.unlink()
    assert "q~" not in text and "~q" not in text


def test_nothing_of_the_environment_is_written_wholesale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("INNOCENT", "canary-1234")
    monkeypatch.setenv("SLURM_JWT", "canary-5678")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert "canary" not in _contents(_run(str(tmp_path)))
    assert os.environ["INNOCENT"] == "canary-1234"
