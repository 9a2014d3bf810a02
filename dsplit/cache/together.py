"""Which calls may share a forward pass: those whose values have equal shapes, so that nothing is ever padded."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from dsplit.models.family import ModelFamily
from dsplit.shapes import ragged_axis
from dsplit.units import Unit

if TYPE_CHECKING:
    from dsplit.cache.plan import Call
    from dsplit.cache.store import Store

HELD = 10_000  # calls that wait for others of their shape, at most


def rows_of(unit: Unit, family: ModelFamily, wanted: int) -> int:
    """The rows that one forward pass of `unit` takes where `wanted` are asked for.

    One where no component is called, where a file is read directly, and where nobody can tell the length of an output
    beforehand.
    """
    files = {column.name for column in family.columns if column.kind == "file"}
    alone = not unit.components or files & set(unit.inputs) or uncounted(unit, family)
    return 1 if alone else wanted


def uncounted(unit: Unit, family: ModelFamily) -> bool:
    """True if the lengths of the unit's outputs depend on texts whose tokens the family does not count."""
    return _ragged(unit) and family.token_count is None


def _ragged(unit: Unit) -> bool:
    formulas = [unit.shapes.get(output) for output in unit.outputs]
    return any(formula is None or ragged_axis(formula) is not None for formula in formulas)


class Shapes:
    """Says which calls of one job have equal shapes."""

    def __init__(self, units: Iterable[Unit], family: ModelFamily, components: Mapping[str, Any], store: Store) -> None:
        self._count = family.token_count if any(map(_ragged, units)) else None
        self._limit, self._components, self._store = family.token_limit, components, store

    def of(self, call: Call) -> Hashable:
        """Equal for calls whose inputs and outputs have equal shapes: target size, tokens, shapes of what is read."""
        columns = {"prompt": ""} if call.row is None else {**call.row.columns, **call.row.files, "size": call.row.size}
        read = {name: value for name, value in columns.items() if name in call.job.columns}
        texts = sorted((name, self._tokens(value)) for name, value in read.items() if isinstance(value, str))
        given = sorted((name, self._store.entry(key).shape) for name, key in call.given.items() if key in self._store)
        return read.get("size"), *texts, *given

    def _tokens(self, text: str) -> int:
        if self._count is None:
            return 0
        count = self._count(text, self._components)
        return min(count, self._limit) if self._limit else count


def batches(calls: Iterable[Call], shape: Callable[[Call], Hashable], rows: int) -> Iterator[list[Call]]:
    """The calls in lists of `rows` of one shape each, the last ones of a shape in a shorter list."""
    if rows == 1:
        yield from ([call] for call in calls)
        return
    waiting: dict[Hashable, list[Call]] = {}
    held = 0
    for call in calls:
        of = shape(call)
        waiting.setdefault(of, []).append(call)
        held += 1
        if held > HELD:
            of = next(iter(waiting))  # the one that has waited for longest
        if held > HELD or len(waiting[of]) == rows:
            held -= len(waiting[of])
            yield waiting.pop(of)
    yield from waiting.values()
