"""The `dsplit` command: its subcommands, and the one place that turns an error into a message and an exit code."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from dsplit.commands.cache import cache
from dsplit.commands.options import Command
from dsplit.commands.prepare import prepare
from dsplit.commands.tasks import tasks
from dsplit.commands.train import train
from dsplit.commands.validate import validate
from dsplit.errors import DsplitError, UsageError

OTHERS_WAIT = 3.0  # seconds that the other processes of a launch leave the main one to report the same error first

app = typer.Typer(
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Two-stage training for diffusion models: encode once into a cache, train from the cache.",
)
COMMANDS = {"prepare": prepare, "cache": cache, "train": train, "validate": validate, "tasks": tasks}
for name, function in COMMANDS.items():
    app.command(name, cls=Command)(function)


def _version(wanted: bool) -> None:
    if wanted:
        from dsplit import __version__

        print(f"dsplit {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def dsplit(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show it.")] = False,
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
