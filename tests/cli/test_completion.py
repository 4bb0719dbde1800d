"""`headway completion`: real shells complete what the parsers take."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from headway.cli import VERBS, main
from headway.cli.command_tree import Command, read_commands
from headway.cli.completion import write_bash, write_fish, write_zsh


@pytest.fixture(scope="module")
def commands() -> list[Command]:
    return read_commands(VERBS)


def complete(script: str, lines: Sequence[str], directory: Path) -> list[list[str]]:
    """What bash offers at the end of each line, by the way that its Tab key calls the function."""
    calls = [
        f'COMP_WORDS=({words}) COMP_CWORD={len(line.split(" ")) - 1}; _headway; echo "${{COMPREPLY[*]}}"'
        for line in lines
        for words in [" ".join(shlex.quote(word) for word in line.split(" "))]
    ]
    (directory / "headway.bash").write_text(script)
    code = "\n".join(["compopt() { :; }", "source headway.bash", *calls])  # compopt wants a real Tab
    done = subprocess.run(
        ["bash", "--norc", "-c", code], cwd=directory, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    return [line.split() for line in done.stdout.splitlines()]


def test_bash_completes_verbs_options_choices_and_runs(commands: list[Command], tmp_path: Path) -> None:
    (tmp_path / "runs" / "digits-x7k2").mkdir(parents=True)
    expected = {
        "headway ver": ["verify-resume"],
        "headway --v": ["--version"],
        "headway run --np": ["--nproc"],
        "headway run --nproc ": [],  # files
        "headway run --nproc 2 --sm": ["--smoke"],
        "headway run train.py --np": [],  # the script's
        "headway run --nproc 2 train.py --np": [],
        "headway data p": ["pack"],
        "headway data pack --sh": ["--shard-mb", "--shuffle"],
        "headway runs r": ["rebuild", "rm"],
        "headway runs rm dig": ["digits-x7k2"],
        "headway compare digits-x7k2 dig": ["digits-x7k2"],
        "headway runs --state fa": ["failed"],
        "headway report x7k2 --root ru": ["runs"],
        "headway completion z": ["zsh"],
        "headway plan run.yaml --ti": ["--timeline"],
        "headway nonsense ": [],
    }
    assert (
        dict(zip(expected, complete(write_bash(commands), list(expected), tmp_path), strict=True)) == expected
    )


def test_names_of_others_are_not_executed(commands: list[Command], tmp_path: Path) -> None:
    """In a shared root, others may make directories of any name, and compgen expands its words."""
    for name in ("$(touch${IFS}pwned)", "`touch${IFS}pwned`", "$(touch pwned)", "digits-x7k2"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    offered = complete(write_bash(commands), ["headway watch dig", "headway compare digits-x7k2 "], tmp_path)
    assert not (tmp_path / "pwned").exists()
    assert offered == [["digits-x7k2"]] * 2


def options_in_help(words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> set[str]:
    """The long options on the page of help of a verb."""
    with suppress(SystemExit):  # argparse leaves, groups return
        main([*words, "--help"])
    heads = re.findall(r"^  (-.*?)(?:  |$)", capsys.readouterr().out, re.MULTILINE)
    return {name for head in heads for name in re.findall(r"--[A-Za-z-]+", head)}


def test_every_option_of_every_verb_is_completed(
    commands: list[Command], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The oracle is the page of help of each verb."""
    lines = [" ".join(["headway", *command.words, "--"]) for command in commands]
    offered = complete(write_bash(commands), lines, tmp_path)
    told = {command.words: options_in_help(command.words, capsys) for command in commands}
    assert len(told) > 40 and len(told["submit",]) > 20
    for command, words in zip(commands, offered, strict=True):
        if not command.verbs or "--json" in told[command.words]:  # the page of a group lists verbs
            assert set(words) == told[command.words], command.words


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts_are_valid(shell: str, commands: list[Command], tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    write = {"bash": write_bash, "zsh": write_zsh, "fish": write_fish}[shell]
    path = tmp_path / "script"
    path.write_text(write(commands))
    done = subprocess.run([shell, "-n", path], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_verb_prints_it(commands: list[Command], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "fish"]) == 0
    assert capsys.readouterr().out == write_fish(commands)
