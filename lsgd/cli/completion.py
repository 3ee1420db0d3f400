"""Shell completion: the candidates, and the scripts that ask for them."""

from pathlib import Path

import click
from click.shell_completion import CompletionItem, get_completion_class

from lsgd.algorithms import ALGORITHMS
from lsgd.plan.run import LENGTH_SETTINGS
from lsgd.settings import changeable

SHELLS = {
    "bash": 'eval "$(lsgd completion bash)"          # in ~/.bashrc',
    "zsh": 'eval "$(lsgd completion zsh)"           # in ~/.zshrc, after compinit',
    "fish": "lsgd completion fish | source           # in ~/.config/fish/config.fish",
}
"""How each shell loads its script."""


def script(main: click.Command, shell: str) -> str:
    """Return the script that completes ``lsgd`` in a shell."""
    kind = get_completion_class(shell)
    assert kind is not None
    return kind(main, {}, "lsgd", "_LSGD_COMPLETE").source()


def algorithms(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the matching algorithms."""
    return [CompletionItem(name) for name in ALGORITHMS if name.startswith(incomplete)]


def settings(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the settings that may change during a run, as ``NAME=``."""
    names = {*LENGTH_SETTINGS, *(name for cls in ALGORITHMS.values() for name in changeable(cls))}
    return [CompletionItem(f"{name}=") for name in sorted(names) if f"{name}=".startswith(incomplete)]


def files(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Let the shell complete file names."""
    return [CompletionItem(incomplete, type="file")]


def devices(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the matching devices."""
    return [CompletionItem(name) for name in ("auto", "cpu", "cuda") if name.startswith(incomplete)]


def runs(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the matching run folders in runs/, newest first; if there are none, the shell completes folder names."""
    found = sorted((str(path) for path in Path("runs").glob("*/")), reverse=True)
    return [CompletionItem(name) for name in found if name.startswith(incomplete)] or [
        CompletionItem(incomplete, type="dir")
    ]
