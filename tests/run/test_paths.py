"""`RunPaths` is the one owner of every path of a run directory: a name that two modules spell cannot change in one."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import headway
from headway.run.paths import RunPaths, step_name, step_of


def names_of_paths(run: RunPaths) -> set[str]:
    """The names in a run directory that do not depend on a rank, a host or a step."""
    found = [getattr(run, name) for name in vars(RunPaths) if isinstance(vars(RunPaths)[name], property)]
    return {part for path in (*found, run.events_file(0)) for part in path.relative_to(run.path).parts}


def written_paths(module: ast.Module) -> Iterator[tuple[int, str]]:
    """Names of files, and names behind a slash or in a list of them, that a module spells out: line, and name."""
    constants = {
        target.id: node.value.value
        for node in module.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(module):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "." in node.value.strip("."):
            yield node.lineno, node.value.rpartition("/")[2]
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            right = node.right
            value = constants.get(right.id) if isinstance(right, ast.Name) else getattr(right, "value", None)
            for part in value.split("/") if isinstance(value, str) else ():
                yield node.lineno, part


OTHERS_FILES = {
    "launcher/agent/launch_records.py": "launch/ is the agents', and has a failure.json of its own",
    "dist/control/failure_handler.py": "it leaves the record for the agent beside the rendezvous",
}


def test_no_other_module_puts_a_path_of_the_run_directory_together(tmp_path: Path) -> None:
    names, package = names_of_paths(RunPaths(path=tmp_path)), Path(headway.__file__).parent
    assert {"run.json", "checkpoints", "uncommitted.diff", "events.jsonl"} < names
    found = [
        f"{name}:{line}: {part}"
        for path in sorted(package.rglob("*.py"))
        if (name := path.relative_to(package).as_posix()) not in {"run/paths.py", *OTHERS_FILES}
        for line, part in written_paths(ast.parse(path.read_text()))
        if part in names
    ]
    assert found == []


def test_the_step_of_a_checkpoint_is_read_from_its_name() -> None:
    for step in (0, 7, 10**12, 10**18 - 1):
        assert step_of(step_name(step)) == step
    for name in (
        "step-7",
        "step-000000000007.corrupt-1",
        ".step-000000000007.tmp",
        "latest",
        "step-" + "9" * 19,
    ):
        assert step_of(name) is None
