"""Names from files reach the terminal without anything that it would interpret: not ESC, and no change of direction."""

from __future__ import annotations

import json
import logging
import os
import pty
import sys
from pathlib import Path

import pytest
import torch
import warm
from rich.text import Text
from safetensors.torch import save_file

from headway import checkpoint
from headway.checkpoint import Weights
from headway.checkpoint.weights.loading import load_weights
from headway.cli import main
from headway.cli.screen import EscapingConsole
from headway.errors import HeadwayError, UsageError
from headway.run import Run
from headway.system.log import logger, print_last

EVIL = "\x1b[31m\u202egpj\x9b1m\x07"
SAFE = r"\x1b[31m\u202egpj\x9b1m\x07"


def assert_safe(text: str) -> None:
    assert not [c for c in text if not c.isprintable() and c not in "\n\t"], repr(text)


def test_every_message_of_an_error_is_escaped() -> None:
    """Also that of an exception that a script does not catch, which Python prints."""
    assert str(UsageError(f"{EVIL} is not a file\nnext line")) == f"{SAFE} is not a file\nnext line"
    kinds = [HeadwayError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    assert len(kinds) > 15
    for kind in kinds:
        if kind.__init__ is HeadwayError.__init__:
            assert str(kind(EVIL)) == SAFE


def test_a_message_reaches_handlers_of_a_site_escaped() -> None:
    seen: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        logger.warning("%s is left out", EVIL)
        logger.warning(f"{EVIL} is 100% left out")
    finally:
        logger.removeHandler(handler)
    assert seen == [f"{SAFE} is left out", f"{SAFE} is 100% left out"]


def test_last_words_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    print_last(f"{EVIL}\n")
    assert capsys.readouterr().err == f"{SAFE}\n"


def test_weights_are_reported_escaped(tmp_path: Path) -> None:
    save_file({f"a{EVIL}": torch.zeros(1), "b": torch.zeros(1)}, tmp_path / f"net{EVIL}.safetensors")
    weights = Weights(tmp_path / f"net{EVIL}.safetensors")
    with pytest.raises(UsageError) as caught:
        load_weights(weights, {"b": torch.zeros(1)}, model="net")
    assert SAFE in str(caught.value)
    assert_safe(str(caught.value))


def test_consoles_print_texts_escaped_and_styles_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    EscapingConsole(force_terminal=True, color_system="standard").print(Text(EVIL, "bold"))
    shown = SAFE.removesuffix(r"\x07")  # which rich removes
    assert capsys.readouterr().out == f"\x1b[1m{shown}\x1b[0m\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run in which every name and text is hostile."""
    root = tmp_path / "runs"
    run = Run.create(root, name="evil", config={"lr": EVIL})
    run.begin_attempt(world={"world_size": 1, "nodes": 1, "device": EVIL})
    checkpoint.save(run, {"net": {f"a{EVIL}": torch.ones(1)}, EVIL: 1}, step=1, metrics={f"val/{EVIL}": 0.5})
    metrics = {"train/loss": 1.0, f"train/{EVIL}": 2.0}
    rows = [
        {"kind": "train", "step": n, "stage": EVIL, "epoch": 0, "metrics": metrics, "host": EVIL}
        for n in (1, 2)
    ]
    run.metrics_file(0).parent.mkdir(exist_ok=True)
    run.metrics_file(0).write_text("".join(json.dumps(row) + "\n" for row in rows))
    run.log_file(0).write_text(f"{EVIL}\n")
    run.failure_file.write_text(json.dumps({"rank": 0, "host": EVIL, "error": EVIL, "traceback": EVIL}))
    run.end_attempt(1, status="failed", exit_code=1)
    info = json.loads(run.info_file.read_text())
    info["command"] = ["python", EVIL]
    info["code"] = {"commit": EVIL, "branch": EVIL}
    run.info_file.write_text(json.dumps(info))
    return root


VERBS = [
    "runs --root ROOT", "runs --json --root ROOT", "runs rebuild RUN", "watch RUN", "watch --json RUN",
    "report RUN --output OUT", "compare RUN RUN", "resume RUN", "checkpoint show RUN", "checkpoint show --json RUN",
    "checkpoint show FILE", "checkpoint verify RUN", "checkpoint export RUN OUT", "checkpoint export RUN OUT --part x",
    "data check FILE", "data pack FILE OUT", "data count FILE", "plan FILE",
    "submit --array FILE FILE", "run GONE", "GONE",
]  # fmt: skip


@pytest.mark.parametrize("verb", VERBS, ids=str)
def test_no_verb_prints_what_a_terminal_interprets(
    verb: str, root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (run,) = (path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    file = tmp_path / f"x{EVIL}.yaml"
    file.write_text(f"- {json.dumps(EVIL)}\n")
    places = {"ROOT": root, "RUN": run, "FILE": file, "OUT": tmp_path / f"out{EVIL}", "GONE": EVIL}
    try:
        main([str(places.get(word, word)) for word in verb.split()])
    except SystemExit as end:
        assert end.code in (0, 2)
    shown = capfd.readouterr()
    assert_safe(shown.out)
    assert_safe(shown.err)
    assert shown.out or shown.err


def test_a_screen_of_a_terminal_has_no_names_that_it_would_interpret(root: Path) -> None:
    """The colors of a table are sequences, too: only those of rich remain."""
    (run,) = (path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    control, terminal = pty.openpty()
    with warm.Popen(
        [sys.executable, "-m", "headway", "checkpoint", "show", str(run)], stdout=terminal, stderr=terminal
    ) as shown:
        os.close(terminal)
        text = b""
        try:
            while piece := os.read(control, 1 << 16):
                text += piece
        except OSError:  # Linux says EIO at the end
            pass
        shown.wait()
    os.close(control)
    assert b"\x1b[1m" in text, "it is drawn for a terminal"
    for evil in ("\x1b[31m", "\u202e", "\x9b", "\x07"):
        assert evil.encode() not in text
