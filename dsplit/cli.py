"""The `dsplit` command: its subcommands, and the one place that turns an error into a message and an exit code."""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from dsplit.errors import DsplitError

OTHERS_WAIT = 3.0  # seconds that the other processes of a launch leave the main one to report the same error first

COMMANDS = {  # each is the function of that name in its module, which is imported when the command is called
    "prepare": "Make a run folder, check the data set, fetch the weights.",
    "cache": "Stage 1: encode the data set once, into a cache.",
    "train": "Stage 2: train a LoRA from the cache, or unsplit from the data set.",
    "validate": "Draw pictures with and without the LoRA; check split against unsplit.",
    "tasks": "List model families and tasks, and how each is split.",
}


class Group(TyperGroup):
    """The commands by name; only the one that is called gets its options."""

    def resolve_command(self, ctx: typer.Context, args: list[str]) -> tuple[Any, Any, list[str]]:  # type: ignore[override]
        """The command that `args` name."""
        name, found, rest = super().resolve_command(ctx, args)
        if found is None:  # only while a shell completes
            return None, None, rest
        declared = getattr(importlib.import_module(f"dsplit.commands.{name}"), str(name))
        return name, declared.command(name), rest


app = typer.Typer(
    cls=Group,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Two-stage training for diffusion models: encode once into a cache, train from the cache.",
)
for command, summary in COMMANDS.items():
    app.command(command, help=summary)(lambda: None)


def _version(wanted: bool) -> None:
    if wanted:
        from dsplit import __version__

        print(f"dsplit {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def dsplit(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())
        raise typer.Exit(2)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code of `dsplit ARGV`: 0 done, 1 a clear error, 2 usage, 130 interrupted."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        code: Any = app(args=words, prog_name="dsplit", standalone_mode=False)
        sys.stdout.flush()
        if code == 130:  # Typer's way to say that Ctrl-C was pressed
            raise KeyboardInterrupt
        return code if isinstance(code, int) else 0
    except BrokenPipeError:  # the reader of our output has gone, as in `dsplit tasks | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", 130, words)
    except typer.TyperException as error:
        context = getattr(error, "ctx", None)
        usage = f"{context.get_usage()}\n" if context else ""
        return _fail(error.format_message(), error.exit_code, words, before=usage)
    except DsplitError as error:
        return _fail(str(error), error.exit_code, words)
    except Exception as error:
        return _fail(f"{type(error).__name__}: {error}\n(unexpected; run with --debug for the traceback)", 1, words)


def _fail(message: str, code: int, words: Sequence[str], *, before: str = "") -> int:
    """Shows the error that is being handled, once per launch, and gives back its exit code."""
    rank = os.environ.get("RANK", "0")
    if rank != "0":
        # All processes meet a user's mistake; the launcher ends this one when the main process has told of it.
        time.sleep(0 if code == 130 else OTHERS_WAIT)
        message = f"process {rank}: {message}"
    if "--debug" in words:
        import traceback

        traceback.print_exc()
    if code == 2:
        command = next((f"{w} " for w in words if w in COMMANDS), "")
        message += f"\nTry 'dsplit {command}-h' for help."
    sys.stderr.write(before)
    typer.secho("error: ", fg="red", bold=True, nl=False, err=True)
    typer.echo(message, err=True)
    return code
