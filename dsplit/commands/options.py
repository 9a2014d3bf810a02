"""Command-line options made from the groups of `dsplit.recipe`, and the one command class that reads them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, dataclass, fields
from typing import Annotated, Any

import typer
import typer.main
from typer.core import TyperCommand

from dsplit.commands.reference import rewrite

PANELS = {
    "ModelOptions": "Model",
    "DataOptions": "Data",
    "CacheOptions": "Cache",
    "TrainOptions": "Training",
    "ValidateOptions": "Validation",
    "PrepareOptions": "Prepare",
}
TYPES = {"str": str, "int": int, "float": float, "bool": bool, "list[str]": list[str]}
JSON = ("as_json", bool, typer.Option("--json", help="Print one JSON object on stdout."))
DEBUG = ("debug", bool, typer.Option("--debug", help="Show the traceback of an error."))

OFF = "no_"
Given = dict[str, Any]  # the options that the command line states, in its order


class Command(TyperCommand):
    """A command whose options may be written with underscores or with the reference's names."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        names = {o: (p.name, p.is_flag) for p in self.params for o in (*p.opts, *p.secondary_opts)}  # type: ignore
        args, ctx.meta["order"] = rewrite(args, names)
        return super().parse_args(ctx, args)


def value_type(field: Field) -> Any:
    """The type of an option's value: str, int, float, bool or list[str]."""
    return TYPES[str(field.type).removesuffix(" | None")]


def default_of(field: Field) -> Any:
    """The default of an option."""
    return field.default if field.default_factory is MISSING else field.default_factory()


def shown_default(field: Field) -> str | bool:
    """How the help shows an option's default: as words, as it is (True), or not at all where there is none."""
    return field.metadata["shown"] or default_of(field) not in (None, [])


@dataclass(frozen=True)
class Declared:
    """A command before its options are made: making those of all commands would slow every call down.

    function: called with what the command line states. groups: the groups of its options (of these, `only` the named
    ones, if any); those of `hidden` are accepted but not shown.
    """

    function: Callable[[Given], None]
    groups: tuple[type, ...]
    hidden: tuple[type, ...]
    only: tuple[str, ...]

    @property
    def help(self) -> str:
        """The text of the command's help."""
        return inspect.cleandoc(self.function.__doc__ or "")

    def command(self, name: str) -> TyperCommand:
        """The command with its options, --json and --debug."""

        def callback(ctx: typer.Context, **values: Any) -> None:
            given: Given = {}
            for name in ctx.meta["order"]:
                turned_off = name.startswith(OFF) and name.removeprefix(OFF) in values
                own, value = (name.removeprefix(OFF), False) if turned_off else (name, values[name])
                given.pop(own, None)  # the last one given stands last
                given[own] = value
            given.pop("debug", None)
            self.function(given)

        context = inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
        callback.__signature__ = inspect.Signature([context, *self._parameters()])  # type: ignore
        callback.__annotations__ = {}
        app = typer.Typer(add_completion=False)
        app.command(name, cls=Command, help=self.help)(callback)
        return typer.main.get_command(app)  # type: ignore[return-value]

    def _parameters(self) -> Iterator[inspect.Parameter]:
        seen = set()
        for group in (*self.groups, *self.hidden):
            for field in fields(group):
                if field.name not in seen and (not self.only or field.name in self.only):
                    seen.add(field.name)
                    yield _parameter(field, PANELS.get(group.__name__), group in self.hidden)
                    if value_type(field) is bool and not default_of(field):
                        yield _off(field)
        for name, kind, declared in (JSON, DEBUG):
            yield inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Annotated[kind, declared]
            )


def takes(
    *groups: type, hidden: tuple[type, ...] = (), only: tuple[str, ...] = ()
) -> Callable[[Callable[[Given], None]], Declared]:
    """A decorator that makes a command of a function of what the command line states: option name -> value, in order.

    Its options are those of `groups` (of these, `only` the named ones, if any), --json and --debug; those of `hidden`
    are accepted but not shown.
    """
    return lambda function: Declared(function, groups, hidden, only)


def _parameter(field: Field, panel: str | None, hidden: bool) -> inspect.Parameter:
    kind = value_type(field)
    flag = "--" + field.name.replace("_", "-")
    choices = field.metadata.get("choices", ())
    declared = typer.Option(
        f"{flag}/--no-{flag[2:]}" if kind is bool and default_of(field) else flag,
        help=field.metadata["help"],
        hidden=hidden or field.metadata["hidden"],
        show_default=shown_default(field),
        rich_help_panel=panel,
        autocompletion=_completer(choices) if choices else None,
    )
    default = default_of(field)
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None if default == [] else default,
        annotation=Annotated[kind if default not in (None, []) else kind | None, declared],
    )


def _off(field: Field) -> inspect.Parameter:
    """`--no-x` for a flag that is off by default: only dsplit.toml can have turned it on, so the help leaves it out."""
    flag = typer.Option(f"--no-{field.name.replace('_', '-')}", hidden=True)
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(OFF + field.name, kind, default=False, annotation=Annotated[bool, flag])


def _completer(choices: tuple[str, ...]) -> Callable[[str], list[str]]:
    def complete(incomplete: str) -> list[str]:
        return [c for c in choices if c.startswith(incomplete)]

    return complete
