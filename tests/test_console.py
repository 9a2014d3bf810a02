"""Messages come out as they are written."""

import pytest

from dsplit.console import say, warn


@pytest.mark.parametrize("text", ["metadata.csv:100: empty", "a[bold]b", ":smile:.png", "[/]", "x" * 300])
def test_nothing_in_a_message_is_markup(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    say(text)
    warn(text)
    assert capsys.readouterr().err == f"{text}\nwarning: {text}\n"
