"""A hook of mkdocs: makes the pages that come from the code, and takes in the files that pages link to.

Pages in docs/ link to files of the repository, as they must to work where the repository is browsed. In the site such a
link leads to a page with that file, so the site is complete in itself. The pages of commands and of Python names are
made from the help texts and docstrings each time: they cannot differ from the code.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import inspect
import io
import os
import posixpath
import re
import textwrap
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import headway
from headway.cli import VERBS, help_text, main

ROOT = Path(__file__).parents[1]
PAGES = {
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "README.md": "index.md",
    "benchmarks/results/README.md": "measured.md",
}
_WIDTH = 88
_HELP_WIDTH = 100
_FENCED = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<=\]\()([^)\s#]+)(?=[)#])")
_LANGUAGES = {
    ".py": "python",
    ".sh": "bash",
    ".yaml": "yaml",
    ".toml": "toml",
    ".def": "bash",
    "Dockerfile": "docker",
}


# --- what mkdocs calls


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages that are made here."""
    from mkdocs.structure.files import File

    sources = {
        file.src_uri: (ROOT / "docs" / file.src_uri).read_text() for file in files.documentation_pages()
    }
    made = {"cli.md": cli_page(), **api_pages(), **linked_pages(sources)}
    for uri, text in made.items():
        files.append(File.generated(config, uri, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Leads the links of a page in docs/ to pages of the site."""
    path = f"docs/{page.file.src_uri}"
    return markdown if page.file.generated_by else with_links(markdown, path, page.file.src_uri)


# --- files of the repository


def linked_pages(sources: dict[str, str]) -> dict[str, str]:
    """The pages of all files outside of docs/ to which pages lead, directly or through one another."""
    waiting = [*PAGES, *(path for uri, text in sources.items() for path in targets(text, f"docs/{uri}"))]
    made: dict[str, str] = {}
    while waiting:
        path = waiting.pop()
        uri = page_of(path)
        if uri in made or uri in sources or path.startswith("docs/"):
            continue
        if path.endswith(".md"):
            text = (ROOT / path).read_text()
            waiting += targets(text, path)
            made[uri] = with_links(text, path, uri)
        else:
            made[uri] = f"---\nsearch: {{exclude: true}}\n---\n\n# {path}\n\n{shown(ROOT / path)}"
    return made


def targets(markdown: str, path: str) -> Iterator[str]:
    """Yields the files of the repository to which a file leads."""
    for prose in _FENCED.split(markdown)[::2]:
        for target in _LINK.findall(prose):
            if "://" not in target and not target.startswith("mailto:"):
                yield posixpath.normpath(posixpath.join(posixpath.dirname(path), target))


def with_links(markdown: str, path: str, uri: str) -> str:
    """The text of a file, with links that lead from page to page."""

    def lead(match: re.Match[str]) -> str:
        target = match[1]
        if "://" in target or target.startswith("mailto:"):
            return target
        whole = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
        there = page_of(whole)
        return posixpath.relpath(there, posixpath.dirname(uri) or ".")

    parts = _FENCED.split(markdown)
    parts[::2] = [_LINK.sub(lead, prose) for prose in parts[::2]]
    return "".join(parts)


def page_of(path: str) -> str:
    """Where the site has a file of the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if (ROOT / path / "README.md").is_file():
        path = f"{path}/README.md"
    return PAGES.get(path) or f"source/{path.removesuffix('.md')}.md"


def shown(path: Path) -> str:
    """A file as a block of code, or a directory as the names in it."""
    if path.is_dir():
        return "\n".join(
            f"- `{each.relative_to(ROOT)}`" for each in sorted(path.rglob("*")) if each.is_file()
        )
    language = _LANGUAGES.get(path.suffix) or _LANGUAGES.get(path.name, "text")
    return f"````{language}\n{path.read_text().rstrip()}\n````\n"


# --- commands


def cli_page() -> str:
    """A page with the help of every verb, and of every verb of a verb."""
    parts = ["# Commands", f"```text\n{help_text().rstrip()}\n```"]
    for verb in sorted(VERBS):
        usage = help_of(verb)
        parts += [
            f"## headway {verb}",
            f"{VERBS[verb][0].upper()}{VERBS[verb][1:]}.",
            f"```text\n{usage}\n```",
        ]
        for inner in inner_verbs(verb, usage):
            parts += [f"### headway {verb} {inner}", f"```text\n{help_of(verb, inner)}\n```"]
    return "\n\n".join(parts) + "\n"


@functools.cache
def help_of(*words: str) -> str:
    printed = io.StringIO()
    wide = mock.patch.dict(os.environ, COLUMNS=str(_HELP_WIDTH))
    with wide, contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):  # so argparse ends
        main([*words, "--help"])
    return printed.getvalue().rstrip()


def inner_verbs(verb: str, usage: str) -> list[str]:
    """The verbs of a verb: words that have a help text of their own."""
    words = dict.fromkeys(re.findall(rf"^  (?:headway {verb} )?([a-z][a-z-]*)\b", usage, re.MULTILINE))
    with contextlib.redirect_stderr(io.StringIO()):
        return [word for word in words if help_of(verb, word).startswith(f"usage: headway {verb} {word} ")]


# --- Python names


def api_pages() -> dict[str, str]:
    """A page for `headway` and for each of its public packages, and one that leads to them."""
    packages = {"headway": headway}
    for name in headway.__all__:
        value = getattr(headway, name)
        if isinstance(value, types.ModuleType):
            packages[name] = value
    lines = ["# Python", "`import headway as hw`. Each name is loaded when it is first used.", ""]
    pages = {}
    for name, package in packages.items():
        prefix = "hw" if name == "headway" else f"hw.{name}"
        found = [*public_names(package)]
        pages[f"api/{name}.md"] = api_page(prefix, package, found)
        links = ", ".join(f"[{each}]({name}.md#{anchor(prefix, each)})" for each, _ in found)
        lines += [f"**[{prefix}]({name}.md)**: {links}", ""]
    return {**pages, "api/index.md": "\n".join(lines)}


def public_names(package: Any) -> Iterator[tuple[str, Any]]:
    """Yields what a package exports, without modules and constants."""
    own = [
        name for name, value in vars(package).items() if getattr(value, "__module__", "") == package.__name__
    ]
    for name in getattr(package, "__all__", None) or sorted(own):
        value = getattr(package, name)
        if not name.startswith("_") and callable(value) and not isinstance(value, types.ModuleType):
            yield name, value


def anchor(prefix: str, name: str) -> str:
    return re.sub(r"[^\w-]", "", f"{prefix}{name}".lower())


def api_page(prefix: str, package: Any, names: list[tuple[str, Any]]) -> str:
    parts = [f"# {prefix}", docstring(package)]
    for name, value in names:
        parts += [f"## {prefix}.{name}", signature(name, value), docstring(value)]
        if inspect.isclass(value):
            parts += methods(name, value)
    return "\n\n".join(part for part in parts if part) + "\n"


def methods(name: str, owner: type) -> Iterator[str]:
    """Yields signature and docstring of each public method and property, inherited ones of headway included."""
    for each, value in inspect.getmembers(owner):
        plain = inspect.unwrap(value) if callable(value) else getattr(value, "fget", value)
        ours = getattr(plain, "__module__", "") or ""
        if each.startswith("_") or not ours.startswith("headway") or inspect.isclass(value):
            continue
        described = docstring(plain)
        if described:
            yield f"### {name}.{each}" + (" (property)" if isinstance(value, property) else "")
            yield signature(each, plain) if callable(value) else ""
            yield described


def signature(name: str, value: Any) -> str:
    """How something is called, as a block of code; a parameter a line where they do not fit one."""
    try:
        found = inspect.signature(value)
    except (TypeError, ValueError):  # made in C, or no function
        return ""
    shown: list[str] = []
    for each in found.parameters.values():
        if each.kind is each.KEYWORD_ONLY and not any(word.startswith("*") for word in shown):
            shown.append("*")
        shown.append(parameter(each))
    shown = [word for word in shown if word.partition(":")[0] not in ("self", "cls")]
    result = found.return_annotation
    end = "" if result is found.empty or inspect.isclass(value) else f" -> {type_name(result)}"
    line = f"{name}({', '.join(shown)}){end}"
    if len(line) > _WIDTH:
        line = "\n".join([f"{name}(", *(f"    {word}," for word in shown), f"){end}"])
    return f'<div class="signature" markdown="1">\n\n```python\n{line}\n```\n\n</div>'


def parameter(one: inspect.Parameter) -> str:
    stars = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
    hint = "" if one.annotation is one.empty else f": {type_name(one.annotation)}"
    if one.default is one.empty:
        return f"{stars}{one.name}{hint}"
    default = "..." if one.default is ... or "<" in repr(one.default) else repr(one.default)
    return f"{one.name}{hint} = {default}" if hint else f"{one.name}={default}"


def type_name(hint: Any) -> str:
    return hint if isinstance(hint, str) else inspect.formatannotation(hint)


def docstring(value: Any) -> str:
    """A docstring as Markdown: what begins with >>>, and what is Python, is code."""
    text = inspect.getdoc(value) or ""
    if dataclasses.is_dataclass(value) and text.startswith(f"{getattr(value, '__name__', '')}("):
        return ""  # made by dataclass: the signature again
    parts = []
    for paragraph in re.split(r"\n{2,}", text):
        if paragraph.startswith(">>>"):
            parts.append(f"```pycon\n{paragraph}\n```")
        elif is_code(paragraph):
            parts.append(f"```python\n{textwrap.dedent(paragraph)}\n```")
        else:
            parts.append(paragraph)
    return re.sub(r"\n```\n\n```python\n", "\n\n", "\n\n".join(parts))


def is_code(paragraph: str) -> bool:
    """Whether a paragraph of a docstring is an example: Python, or part of one that an indentation sets apart.

    >>> is_code("run = hw.find_latest('runs')"), is_code("Returns the run."), is_code("    while it runs:")
    (True, False, True)
    """
    if all(line.startswith("    ") for line in paragraph.splitlines()):
        return True
    with contextlib.suppress(SyntaxError):
        return bool(ast.parse(paragraph).body)
    return False
