"""Arguments of a script as groups, so that those of a run can be changed: `--lr 0.1`, `--lr=0.1`, `lr=0.1`, or a word.

change(["--lr", "0.1", "--fast"], ["--lr", "0.01"])     ->  ["--lr", "0.01", "--fast"]
find_changes(["--lr", "0.1", "--fast"], ["--fast", "--lr", "0.01"])     ->  ["--lr", "0.01"]
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from itertools import chain

_OPTION = re.compile(r"(-{1,2}[^\W\d][^=\s]*)(=.*)?", re.DOTALL)  # a negative number is a value
_PYTHON_OPTION = re.compile(r"-[a-zA-Z]*?([cmWX])(.*)", re.DOTALL)
_ASSIGNMENT = re.compile(r"(\+{0,2}~?[^\W\d][\w./@-]*)=.*", re.DOTALL)

_Group = tuple[str | None, list[str]]
"""what the words set, or None for words alone, and the words"""


def split_command(command: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits a command line of Python into what starts the script, and the arguments of the script.

    >>> split_command(["python3", "-X", "dev", "-um", "mypackage.train", "--lr", "1"])
    (['python3', '-X', 'dev', '-um', 'mypackage.train'], ['--lr', '1'])
    """
    index = 1
    while index < len(command):
        option = _PYTHON_OPTION.fullmatch(command[index])
        takes_word = option is not None and not option[2]
        index += 1 + takes_word
        if (option is not None and option[1] in "cm") or (option is None and command[index - 1][:1] != "-"):
            break
    return list(command[:index]), list(command[index:])


def change(arguments: Sequence[str], new: Sequence[str]) -> list[str]:
    """Returns the arguments with new ones: options and assignments replace their old values, or are added.

    New arguments that begin with a plain word replace all: it may be a command or a file.

    >>> change(["data.csv", "--lr", "0.1"], ["--lr", "0.01", "--fast"])
    ['data.csv', '--lr', '0.01', '--fast']
    >>> change(["--lr", "0.1", "data.csv"], ["--lr", "0.01"])
    ['--lr', '0.01', 'data.csv']
    >>> change(["one", "--fast"], ["two"])
    ['two']
    """
    additions = _groups(new)
    if additions and additions[0][0] is None:
        return list(new)
    groups = _groups(arguments)
    for name, words in additions:
        for index, (known, before) in enumerate(groups):
            if known == name:
                # words that follow the value of an option may be arguments of their own
                groups[index] = (name, [*words, *before[_length(before, words) :]])
                break
        else:
            groups.append((name, words))
    return list(chain.from_iterable(words for _, words in groups))


def _length(before: Sequence[str], words: Sequence[str]) -> int:
    """Returns how many words of an old option those of a new one replace: `--lr 0.1` has as many as `--lr=0.01`."""
    joined = [bool(match and match[2]) for match in (_OPTION.fullmatch(each[0]) for each in (before, words))]
    return len(words) + joined[1] - joined[0]


def find_changes(arguments: Sequence[str], now: Sequence[str]) -> list[str] | None:
    """Returns the new arguments with which `change` makes `arguments` mean `now`; None if there are none.

    >>> find_changes(["--fast"], []) is None
    True
    """
    known = _groups(arguments)
    found = list(
        chain.from_iterable(words for group in _groups(now) if group not in known for words in group[1:])
    )
    made = change(arguments, found)
    return found if sorted(map(str, _groups(made))) == sorted(map(str, _groups(now))) else None


def find_named(arguments: Sequence[str], names: Collection[str]) -> list[str] | None:
    """Returns the arguments that set these names; None if any is not among them.

    >>> find_named(["--fast", "--lr", "0.1", "opt.weight-decay=0"], ["lr", "weight_decay"])
    ['--lr', '0.1', 'opt.weight-decay=0']
    """
    found = {}
    for name, words in _groups(arguments):
        found[(name or "").lstrip("-+").rpartition(".")[2].replace("-", "_")] = words
    return list(chain.from_iterable(found[name] for name in names)) if found.keys() >= set(names) else None


def _groups(arguments: Sequence[str]) -> list[_Group]:
    groups: list[_Group] = []
    takes_values = False
    for word in arguments:
        if option := _OPTION.fullmatch(word):
            groups.append((option[1], [word]))
            takes_values = option[2] is None
        elif assignment := _ASSIGNMENT.fullmatch(word):
            groups.append((assignment[1], [word]))
            takes_values = False
        elif takes_values:
            groups[-1][1].append(word)
        else:
            groups.append((None, [word]))
    return groups
