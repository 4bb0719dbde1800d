"""Prints the shape of the house: what one must open to follow one thing. For a person to judge; nothing fails.

make shape                                      the table
python scripts/shape --walks step,save          these walks alone, with their files
python scripts/shape --classes 5 --cycles       the classes that others use most, and the import cycles
"""

from __future__ import annotations

import argparse
from pathlib import Path

from coupling import UsedClass, used_classes
from modules import count_words, import_cycles, read_modules, share_of_private_tests, sizes
from walks import WALKS, Walk, walk


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, default=Path.cwd(), help="a checkout (default: here)")
    parser.add_argument(
        "--walks", default=",".join(WALKS), metavar="NAMES", help="walks to take (default: all)"
    )
    parser.add_argument(
        "--classes", type=int, default=1, metavar="N", help="the N classes that others use most"
    )
    parser.add_argument("--cycles", action="store_true", help="the modules of each import cycle")
    options = parser.parse_args()
    package = options.root / "src" / "headway"

    modules = read_modules(package)
    lines, functions = sizes(modules)
    print("| | |\n|---|---|")
    row("modules, lines of source", f"{len(modules)}, {lines:,}")
    row("functions: median, 95th percentile, longest", ", ".join(map(str, functions)))
    cycles = import_cycles(modules)
    row("largest import cycle, types included", str(max(map(len, cycles), default=1)))
    classes = used_classes(options.root)[: options.classes]
    for used in classes:
        row(
            f"attributes of `{used.name}` that other modules use",
            f"{len(used.attributes)}, in {used.modules} modules",
        )
    names = [name for name in options.walks.split(",") if name]
    taken = [walk(name, options.root) for name in names]
    for each in taken:
        row(f"{each.title}: calls, functions, files", f"{each.calls:,}, {each.functions}, {len(each.files)}")
    row(
        "tests that use private names or monkeypatch", f"{share_of_private_tests(options.root / 'tests'):.0%}"
    )
    row("words of documentation", f"{count_words(options.root / 'docs'):,}")
    if options.cycles:
        for cycle in cycles:
            print(f"\n{len(cycle)} modules:", *sorted(cycle))
    if options.classes > 1:
        print(*(describe(used) for used in classes), sep="\n")
    if len(names) < len(WALKS):
        print(*(files_of(each) for each in taken), sep="\n")


def row(what: str, value: str) -> None:
    print(f"| {what} | {value} |", flush=True)


def describe(used: UsedClass) -> str:
    return f"\n{used.name}: " + " ".join(f"{name}({count})" for name, count in used.attributes.most_common())


def files_of(walk: Walk) -> str:
    return f"\n{walk.title}\n" + "\n".join(f"{count:7,} {name}" for name, count in walk.files.most_common())


if __name__ == "__main__":
    main()
