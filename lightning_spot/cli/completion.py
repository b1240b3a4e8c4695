"""``lightning-spot completion``: a script for bash or zsh that completes commands, flags and their values."""

from __future__ import annotations

import argparse

from lightning_spot.cli.command import command_parser
from lightning_spot.cli.output import print_line

_SCRIPT = """\
_lightning_spot() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" words=""
    if [ "$COMP_CWORD" -eq 1 ]; then
        words="{commands}"
    else
        case "${{COMP_WORDS[1]}} $before $word" in
{cases}
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _lightning_spot lightning-spot"""
_ZSH = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"


def add_completion_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``completion``."""
    parser.add_argument("shell", choices=("bash", "zsh"), help="for which shell")


def completion(arguments: argparse.Namespace) -> int:
    """Print the script."""
    script = (_ZSH if arguments.shell == "zsh" else "") + _script(command_parser())
    for line in script.splitlines():
        print_line(line)
    return 0


def _script(parser: argparse.ArgumentParser) -> str:
    [commands] = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    cases: list[str] = []
    for name, command in commands.choices.items():
        flags: list[str] = []
        values: list[str] = []
        for action in command._actions:
            choices = " ".join(map(str, action.choices or ()))
            if not action.option_strings:
                values.append(choices)
            else:
                flags += action.option_strings
                if action.nargs is None:  # it takes a value: without choices, files are what the shell completes
                    patterns = "|".join(f'"{name} {flag} "*' for flag in action.option_strings)
                    cases.append(f'{patterns}) words="{choices}" ;;')
        cases.append(f'"{name} "*" -"*) words="{" ".join(flags)}" ;;')
        cases.append(f'"{name} "*) words="{" ".join(filter(None, values))}" ;;')
    return _SCRIPT.format(commands=" ".join(commands.choices), cases="\n".join(f"            {case}" for case in cases))
