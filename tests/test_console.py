"""Messages come out as they are written."""

import pytest

from dsplit.console import counted, say, warn


@pytest.mark.parametrize("text", ["metadata.csv:100: empty", "a[bold]b", ":smile:.png", "[/]", "x" * 300])
def test_nothing_in_a_message_is_markup(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    say(text)
    warn(text)
    assert capsys.readouterr().err == f"{text}\nwarning: {text}\n"


def test_one_thing_is_singular_and_others_plural() -> None:
    assert [counted(n, "row") for n in (0, 1, 2)] == ["0 rows", "1 row", "2 rows"]
    assert (counted(1, "batch"), counted(3, "batch")) == ("1 batch", "3 batches")
    assert [counted(n, "epoch") for n in (0.25, 1.0, 1.5)] == ["0.25 epochs", "1 epoch", "1.5 epochs"]
