"""`headway completion`: prints scripts that complete the command line of headway."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence

import headway
from headway import cli
from headway.cli.command_tree import Command, CommandOption, read_commands
from headway.cli.parser import Parser
from headway.errors import DONE

_DOES_CHARS = 70
_EXAMPLES = """\
examples:
  headway completion bash > ~/.local/share/bash-completion/completions/headway
  headway completion zsh > ~/.zfunc/_headway            with fpath+=~/.zfunc before compinit in ~/.zshrc
  headway completion fish > ~/.config/fish/completions/headway.fish
  source <(headway completion bash)                     for this shell only

The script contains all verbs, options and choices, and starts no Python. Print it again after an update of headway.
"""

_BASH = """\
# Completion of headway {version} for bash, by: headway completion bash
_headway_runs() {{  # only names of runs: compgen expands its words, and executes a name such as $(id)
    command ls runs 2> /dev/null | LC_ALL=C grep -xE "[A-Za-z0-9_][A-Za-z0-9._-]*"
}}
_headway() {{
    local cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD-1]}} key='' at=1 word
    local verbs='' options='' valued='' runs='' script=''
    COMPREPLY=()
    while ((at < COMP_CWORD)); do
        case "$key ${{COMP_WORDS[at]}}" in
            {paths}) key="${{key:+$key }}${{COMP_WORDS[at]}}" ;;
            *) break ;;
        esac
        ((at++))
    done
    case "$key" in
{commands}
    esac
    if [[ $script ]]; then  # what follows a script belongs to it
        local before=$at
        while ((before < COMP_CWORD)); do
            word=${{COMP_WORDS[before]}}
            if [[ $word != -* ]]; then
                return
            elif [[ " $valued " == *" $word "* ]]; then
                ((before++))
            fi
            ((before++))
        done
    fi
    case "$key $prev" in
{values}
    esac
    if [[ " $valued " == *" $prev "* ]]; then
        return  # files
    elif [[ $cur == -* ]]; then
        mapfile -t COMPREPLY < <(compgen -W "$options" -- "$cur")
    else
        if ((at == COMP_CWORD)); then mapfile -t COMPREPLY < <(compgen -W "$verbs" -- "$cur"); fi
        if [[ $runs ]]; then
            mapfile -t -O ${{#COMPREPLY[@]}} COMPREPLY < <(compgen -W "$(_headway_runs)" -- "$cur")
        fi
    fi
}}
complete -o bashdefault -o default -F _headway headway
"""

_ZSH = """\
#compdef headway
# Completion of headway {version} for zsh, by: headway completion zsh
_headway() {{
    local key= at=2 script=
    local -a verbs options ids
    while (( at < CURRENT )); do
        case "$key $words[at]" in
            {paths}) key="${{key:+$key }}$words[at]" ;;
            *) break ;;
        esac
        (( at++ ))
    done
    case "$key" in
{commands}
    esac
    if [[ -n $script ]]; then  # what follows a script belongs to it
        local before
        for before in $words[at,CURRENT-1]; do
            if [[ $before == *.py ]]; then _files; return; fi
        done
    fi
    case "$key $words[CURRENT-1]" in
{values}
    esac
    if [[ $PREFIX == -* ]]; then
        _describe -o option options
    else
        if (( at == CURRENT && $#verbs )); then _describe verb verbs; fi
        if (( $#ids )); then compadd -a ids; fi
        _files
    fi
}}
if [[ $funcstack[1] == _headway ]]; then _headway "$@"; else compdef _headway headway; fi
"""

_FISH = """\
# Completion of headway {version} for fish, by: headway completion fish
function __headway_at  # whether the words before the cursor are these verbs, and then no script
    set -l words (commandline -opc)[2..]
    test (count $words) -ge (count $argv); or return 1
    for number in (seq (count $argv))
        test "$words[$number]" = "$argv[$number]"; or return 1
    end
    not string match -q -- '*.py' $words
end
function __headway_next  # whether the next word is a verb below these
    __headway_at $argv; and test (count (commandline -opc)) -eq (math 1 + (count $argv))
end
"""


def main(argv: list[str]) -> int:
    parser = Parser("completion", "Prints a script that completes headway in your shell.", _EXAMPLES)
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell")
    options = parser.parse_args(argv)
    write = {"bash": write_bash, "zsh": write_zsh, "fish": write_fish}[options.shell]
    print(write(read_commands(cli.VERBS)), end="")
    return DONE


def write_bash(commands: Sequence[Command]) -> str:
    """Returns the script for bash."""
    return _fill(_BASH, commands, map(_bash_command, commands), _bash_values(commands))


def _fill(template: str, commands: Sequence[Command], cases: Iterable[str], values: Iterable[str]) -> str:
    return template.format(
        version=headway.__version__,
        paths=_paths(commands),
        commands="\n".join(cases),
        values="\n".join(values),
    )


def _bash_command(command: Command) -> str:
    facts = {
        "verbs": " ".join(command.verbs or ()),
        "options": " ".join(name for option in command.options for name in option.names),
        "valued": " ".join(
            name for option in command.options if option.value != "none" for name in option.names
        ),
        "runs": "1" if command.takes_runs else "",
        "script": "1" if command.takes_script else "",
    }
    assignments = " ".join(f"{name}={shlex.quote(text)}" for name, text in facts.items() if text)
    return f'        "{" ".join(command.words)}") {assignments} ;;'


def _bash_values(commands: Sequence[Command]) -> Iterator[str]:
    for command, option in _with_values(commands):
        offered = {
            "directory": 'compopt -o filenames; mapfile -t COMPREPLY < <(compgen -d -- "$cur")',
            "run": 'mapfile -t COMPREPLY < <(compgen -W "$(_headway_runs)" -- "$cur")',
            "choice": f'mapfile -t COMPREPLY < <(compgen -W {shlex.quote(" ".join(option.choices))} -- "$cur")',
        }[option.value]
        yield f"        {_patterns(command, option)}) {offered}; return ;;"


def write_zsh(commands: Sequence[Command]) -> str:
    """Returns the script for zsh."""
    return _fill(_ZSH, commands, map(_zsh_command, commands), _zsh_values(commands))


def _zsh_command(command: Command) -> str:
    options = [(name, option.does) for option in command.options for name in option.names]
    assignments = [f"verbs=({_zsh_list((command.verbs or {}).items())})", f"options=({_zsh_list(options)})"]
    assignments += ["ids=(runs/*(N:t))"] if command.takes_runs else []
    assignments += ["script=1"] if command.takes_script else []
    return f'        "{" ".join(command.words)}") {"; ".join(assignments)} ;;'


def _zsh_list(named: Iterable[tuple[str, str]]) -> str:
    return " ".join(shlex.quote(f"{name}:{_short(does)}") for name, does in named)


def _zsh_values(commands: Sequence[Command]) -> Iterator[str]:
    for command, option in _with_values(commands):
        offered = {
            "directory": "_files -/",
            "run": "compadd -- runs/*(N:t)",
            "choice": f"compadd {shlex.join(option.choices)}",
        }[option.value]
        yield f"        {_patterns(command, option)}) {offered}; return ;;"


def write_fish(commands: Sequence[Command]) -> str:
    """Returns the script for fish."""
    lines = [_FISH.format(version=headway.__version__)]
    for command in commands:
        words = " ".join(command.words)
        at, below = (f"complete -c headway -n '__headway_{kind} {words}'" for kind in ("at", "next"))
        for name, does in (command.verbs or {}).items():
            lines.append(f"{below} -f -a {name} -d {_fish_quote(_short(does))}\n")
        if command.takes_runs:
            lines.append(f"{at} -a '(ls runs 2> /dev/null)'\n")
        lines += [f"{at} {_fish_option(option)}\n" for option in command.options]
    return "".join(lines)


def _fish_option(option: CommandOption) -> str:
    names = [f"-l {name[2:]}" if name[:2] == "--" else f"-s {name[1:]}" for name in option.names]
    offered = {
        "none": [],
        "directory": ["-x -a '(__fish_complete_directories)'"],
        "run": ["-x -a '(ls runs 2> /dev/null)'"],
        "choice": [f"-x -a {_fish_quote(' '.join(option.choices))}"],
        "other": ["-r"],
    }[option.value]
    return " ".join([*names, *offered, f"-d {_fish_quote(_short(option.does))}"])


def _fish_quote(text: str) -> str:
    return "'" + re.sub(r"(['\\])", r"\\\1", text) + "'"


# --- for all shells


def _paths(commands: Sequence[Command]) -> str:
    """Returns the shell pattern that matches each verb after its parent."""
    return " | ".join(
        f'"{" ".join(command.words[:-1])} {command.words[-1]}"' for command in commands if command.words
    )


def _with_values(commands: Sequence[Command]) -> Iterator[tuple[Command, CommandOption]]:
    """Yields the options whose values are directories, runs or choices; shells complete others as files."""
    for command in commands:
        for option in command.options:
            if option.value in ("directory", "run", "choice"):
                yield command, option


def _patterns(command: Command, option: CommandOption) -> str:
    return " | ".join(f'"{" ".join(command.words)} {name}"' for name in option.names)


def _short(does: str) -> str:
    """Cuts a description to what fits beside a name."""
    return does if len(does) <= _DOES_CHARS else does[: _DOES_CHARS - 3].rstrip(" ,") + "..."
