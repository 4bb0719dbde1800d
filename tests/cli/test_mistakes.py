"""What people see when they mistype: one sentence on standard error, exit code 2, and nothing made."""

from __future__ import annotations

import errno
import io
import os
import py_compile
import re
import shlex
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path

import pytest

from headway.cli import VERBS, main
from headway.cli.run import main as run_verb
from headway.errors import StorageError, UsageError
from headway.run import Run

HEADWAY = [sys.executable, "-m", "headway"]

MISTAKES = [
    ("rnu", "did you mean 'run'?"),
    ("--verison", "did you mean '--version'?"),
    ("run", "the following arguments are required: SCRIPT; see: headway run --help"),
    ("run --nprc 2 train.py", "unrecognized arguments: --nprc (did you mean --nproc?)"),
    (
        "run --nproc two train.py",
        "argument --nproc: 'two' is not a whole number of 1 or more; see: headway run --help",
    ),
    ("run --nproc 0 train.py", "argument --nproc: '0' is not a whole number of 1 or more"),
    ("run --max 2 train.py", "unrecognized arguments: --max"),
    ("run --max-restarts -1 train.py", "'-1' is not a whole number of 0 or more"),
    ("run missing.py", "there is no file 'missing.py'"),
    ("run --array lr=1,2", "the following arguments are required: SCRIPT"),
    ("run --array lr=1 lr=2 train.py", "the sweep sets 'lr' twice"),
    ("run --smoke --array lr=1,2 train.py", "--smoke tries one run once"),
    ("run --smoke --max-restarts 2 train.py", "--smoke tries one run once"),
    ("submit --gpus 8 train.py", "unrecognized arguments: --gpus (did you mean --gpus-per-node?)"),
    ("submit --dry-run --time tomorrow train.py", "is not a valid time limit"),
    ("submit --dry-run --on missing.yaml train.py", "missing.yaml cannot be read"),
    ("submit --dry-run --env HOME train.py", "write NAME=VALUE"),
    ("submit --json --watch train.py", "--json and --watch do not go together"),
    ("submit --json --dry-run train.py", "--json and --dry-run do not go together"),
    ("runs --root nowhere", "there is no directory 'nowhere'"),
    ("runs --state faild", "invalid choice: 'faild'"),
    ("runs -n -3", "'-3' is not a whole number of 0 or more"),
    ("runs samples", "required: RUN, --step"),
    ("compare", "required: RUN"),
    ("completion tcsh", "argument shell: invalid choice: 'tcsh' (choose from"),
    ("demo --qick", "did you mean --quick?"),
    ("demo .", "is not empty: give the demo a directory of its own"),
    ("compare nosuch", "'nosuch' matches no run"),
    ("doctor --rot x", "did you mean --root?"),
    ("verify-resume missing.py", "there is no file 'missing.py'"),
    ("verify-resume --nproc 0 train.py", "argument --nproc: '0' is not a whole number of 1 or more"),
    (
        "verify-resume --other-nproc 0 train.py",
        "argument --other-nproc: '0' is not a whole number of 1 or more",
    ),
    ("verify-resume --timeout nan train.py", "argument --timeout: 'nan' is not a finite number"),
    ("verify-resume --timeout 1e300 train.py", "'1e300' is not a number above 0 and at most 1e+09"),
    (
        "submit --dry-run --root train.py train.py",
        "train.py' is not a directory: give --root a directory for runs",
    ),
    (
        "submit --dry-run --root train.py/runs train.py",
        "train.py' is not a directory: give --root a directory",
    ),
    ("submit --root train.py train.py", "train.py' is not a directory: give --root a directory for runs"),
    ("checkpoint verify nowhere", "there is no file or directory '"),
    ("checkpoint export nowhere out.safetensors", "there is no file or directory '"),
    (
        "checkpoint export . out.safetensors --shard-gb nan",
        "argument --shard-gb: 'nan' is not a finite number",
    ),
    ("plan module", "give the function that returns your module first: headway plan module FILE.py:function"),
    ("plan measure --batch-size 4 train.py:f", "headway plan measure FILE.py:function"),
    (
        "plan module train.py:f --extrapolate layers=0",
        "expected the factory's argument and a number: layers=96",
    ),
    ("verify-resume --at middle train.py", "'middle' is not a valid point to kill at"),
    ("checkpoint shwo .", "there is no checkpoint verb 'shwo' (did you mean 'show'?)"),
    ("checkpoint show", "the following arguments are required: PATH"),
    ("checkpoint export .", "OUT.safetensors"),
    ("checkpoint show nowhere", "nowhere cannot be read: No such file or directory"),
    ("checkpoint verify .", "has no checkpoints"),
    ("agent", "give a script, or --run DIR; see: headway agent --help"),
    ("data stage", "required: SOURCE"),
    ("data ls --rot x", "did you mean --root?"),
    ("data pack", "the following arguments are required: DIR, OUT; see: headway data pack --help"),
    ("data pack x", "the following arguments are required: OUT; see: headway data pack --help"),
    (
        "data add public rgb",
        "the following arguments are required: NAME, SPLIT; see: headway data add --help",
    ),
    ("data stubs nowhere/names.py", "there is no directory 'nowhere'"),
    ("data ls --root nowhere", "there is no directory 'nowhere'"),
    ("data ls --root train.py", "'train.py' is not a directory"),
    ("data count --root nowhere", "there is no directory 'nowhere'"),
    ("data check", "give a name, directory, pattern or shard; see: headway data check --help"),
    ("data index", "give a name, directory, pattern or shard; see: headway data index --help"),
    ("data bench", "give a name, directory, pattern or shard; see: headway data bench --help"),
    ("data check nowhere.tar", "there is no file 'nowhere.tar'\n"),
    ("data count train.py/nowhere.tar", "there is no file 'train.py/nowhere.tar'"),
    ("cache ls --pth x", "did you mean --path?"),
    ("cache ls --path nowhere", "there is no directory 'nowhere'"),
    ("plan module missing.py:f", "headway: there is no file missing.py in "),
    ("plan measure missing.py:f", "headway: there is no file missing.py in "),
    ("plan module train.py:f --precision half", "headway: 'half' is not a valid value of precision"),
    ("plan list --jsn", "did you mean --json?"),
    ("plan preset llama-3.1-8b --json --explain time.step", "--json prints all answers: leave out --explain"),
    ("plan search llama-3.1-8b --gpus 8 --json --emit submit", "--json prints all layouts: leave out --emit"),
    ("plan serch run.yaml", "there is no plan verb or file 'serch' (did you mean 'search'?)"),
    ("data chekc x", "there is no data verb 'chekc' (did you mean 'check'?); see: headway data --help"),
    ("cache lss", "there is no cache verb 'lss' (did you mean 'ls'?)"),
]


@pytest.mark.parametrize(("line", "said"), MISTAKES, ids=[line for line, _ in MISTAKES])
def test_a_mistake_is_one_sentence(
    line: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('nobody should run this')\n")
    assert main(line.split()) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("headway: ") and shown.err.count("\n") == 1
    assert said in shown.err
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_sentence_needs_no_utf8(encoding: str) -> None:
    command = [*HEADWAY, "doctor", "--rot", "x"]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONIOENCODING": encoding}, capture_output=True, text=True
    )
    expected = "headway: unrecognized arguments: --rot x (did you mean --root?); see: headway doctor --help\n"
    assert (done.returncode, done.stderr) == (2, expected)


@pytest.mark.parametrize("verb", ["", "run --help", "checkpoint --help", "runs", "plan list"])
def test_a_reader_who_has_seen_enough_is_no_error(verb: str, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    command = subprocess.Popen(
        [*HEADWAY, *verb.split()], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path
    )
    assert command.stdout is not None and command.stderr is not None
    command.stdout.close()  # before anything can have been written
    with command.stderr:
        assert command.stderr.read() == b""
    assert command.wait() == 0


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("verb", ["runs", "runs rm", "report", "watch --once"])
def test_closed_standard_streams_are_no_failure(tmp_path: Path, verb: str, closed: str) -> None:
    """Some supervisors start a command without standard streams."""
    run = Run.create(tmp_path / "runs", name="digits")
    name = "" if verb == "runs" else run.id
    script = f"{shlex.join(HEADWAY)} {verb} {name} {closed}; echo $? > code"
    ended = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert "Traceback" not in ended.stderr
    assert (tmp_path / "code").read_text().strip() == ("2" if verb == "runs rm" else "0")


def test_an_empty_word_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "list", ""]) == 2
    assert "unrecognized arguments: an empty argument" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv",
    [
        "report|",
        "report|-o|",
        "runs|--root|",
        "runs|rebuild|",
        "watch|",
        "web|--root|",
        "checkpoint|show|",
        "checkpoint|verify|",
        "data|pack||",
        "run|",
        "submit|",
    ],
)
def test_an_empty_word_is_not_this_directory_or_the_newest_run(
    argv: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`headway report "$RUN"` with an unset variable."""
    monkeypatch.chdir(tmp_path)
    run = Run.create("runs", name="digits")
    assert main(argv.split("|")) == 2
    assert "got an empty argument, perhaps an unset variable; see: headway" in capsys.readouterr().err
    assert not (run.path / "report.html").exists()


def test_a_directory_that_is_gone_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gone").mkdir()
    os.chdir("gone")
    Path("../gone").rmdir()
    assert main(["run", "missing.py"]) == 2
    assert "headway: the working directory no longer exists" in capsys.readouterr().err


def test_no_directory_for_temporary_files_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**_: object) -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    monkeypatch.setattr(tempfile, "mkdtemp", fail)
    assert main(["run", "--smoke", "train.py"]) == 74
    assert (
        "headway: No usable temporary directory found in ['/tmp']; for temporary files, TMPDIR"
        in capsys.readouterr().err
    )


def test_an_axis_may_be_longer_than_the_name_of_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    seeds = ",".join(map(str, range(100)))
    assert main(["run", "--array", "lr=1", f"seed={seeds}", "lr=2", "train.py"]) == 2
    assert "the sweep sets 'lr' twice" in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of others")
@pytest.mark.parametrize("line", ["runs --root {}/runs", "watch {}/runs", "data count {}/runs"])
def test_what_may_not_be_read_is_one_sentence(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    import_module(f"headway.cli.{line.split()[0]}")  # which the other user may not be able to read
    with tempfile.TemporaryDirectory() as closed:  # root's alone
        os.seteuid(65534)
        try:
            code = main(line.format(closed).split())
        finally:
            os.seteuid(os.getuid())
    said = capsys.readouterr().err
    assert code in (UsageError.exit_code, StorageError.exit_code)
    assert said.count("\n") == 1 and f"{closed}/runs" in said and "Permission denied" in said


def test_output_that_cannot_be_written_is_one_sentence() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([*HEADWAY, "plan", "list"], stdout=full, stderr=subprocess.PIPE, text=True)
    expected = "headway: the output could not be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (StorageError.exit_code, expected)


def test_names_of_files_need_not_be_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / os.fsdecode(b"caf\xe9.csv")
    source.touch()
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, "utf-8"))
    assert main(["data", "stage", "--tmp", str(tmp_path / "node"), str(source)]) == 0
    assert shown.getvalue().splitlines()[0].endswith(rb"caf\udce9.csv")


def test_an_array_takes_several_axes_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    (tmp_path / "train.py").write_text(
        "import os, sys\nprint(*sys.argv[1:], file=open(os.environ['OUT'], 'a'))\n"
    )
    code = run_verb(
        ["--array", "lr=1,2", "seed=3,4", "--nproc", "1", "train.py", "a=b", "--array", "x=1", "y=2"]
    )
    assert code == 0
    own = "a=b --array x=1 y=2"  # what follows the script is the script's, however it looks
    expected = [f"{own} --lr={lr} --seed={seed}" for lr in (1, 2) for seed in (3, 4)]
    assert (tmp_path / "out").read_text().splitlines() == expected


def test_the_commands_that_messages_advise_exist() -> None:
    source = Path(import_module("headway").__file__ or "").parent
    advised = {
        (word, path.name)
        for path in source.rglob("*.py")
        for word in re.findall(r"(?:: |`)headway ([a-z][a-z-]*)", path.read_text())
    }
    # "never" is not a verb: a sentence begins so
    assert [(word, name) for word, name in sorted(advised) if word not in {*VERBS, "never"}] == []
    assert len(advised) > 20, "messages were found"


def test_commands_work_where_their_source_cannot_be_read(tmp_path: Path) -> None:
    """Help is read from the source, which another user's installation, or one of compiled files, does not show."""
    source = tmp_path / "options.py"
    source.write_text(
        "from dataclasses import dataclass\n"
        "@dataclass(frozen=True)\n"
        "class Options:\n"
        "    steps: int = 3\n"
        "    '''steps'''\n"
    )
    py_compile.compile(str(source), cfile=str(tmp_path / "options.pyc"))
    source.unlink()
    script = (
        "from options import Options; from headway.cli.parser import parse; "
        "print(parse(Options, ['--steps', '5'], verb='some verb'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("Options(steps=5)\n", "")
