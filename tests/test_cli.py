"""The `dsplit` command: exit codes, messages, what it costs, and the files that are made from it."""

from __future__ import annotations

import os
import re
import resource
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dsplit import __version__, cli
from dsplit.cli import main
from dsplit.commands.options import Given, takes
from dsplit.commands.reference import RENAMED
from dsplit.commands.result import show
from dsplit.errors import DataError, Problem, UsageError
from tests.commands.test_options import REFERENCE

ROOT = Path(__file__).resolve().parent.parent
GENERATED = runpy.run_path(str(ROOT / "tools" / "generate.py"))
BARE = "import typer\napp = typer.Typer()\n@app.command()\ndef a(): ...\n@app.command()\ndef b(): ...\napp()\n"


def command(monkeypatch: pytest.MonkeyPatch, function) -> None:  # type: ignore[no-untyped-def]
    """Puts `function` in the place of what `dsplit tasks` does."""

    def tasks(given: Given) -> None:
        """Stands in."""
        function(given)

    monkeypatch.setattr("dsplit.commands.tasks.tasks", takes()(tasks))


def raises(error: BaseException):  # type: ignore[no-untyped-def]
    def function(given: Given) -> None:
        raise error

    return function


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (DataError("2 faults", [Problem("a.csv:3", "bad"), Problem("a.csv:4", "worse", "mend it")]), 1,
         "error: 2 faults\n  a.csv:3: bad\n  a.csv:4: worse; mend it\n"),
        (UsageError("'[x] [red]y[/]' makes no sense"), 2,
         "error: '[x] [red]y[/]' makes no sense\nTry 'dsplit tasks -h' for help.\n"),
        (ValueError("odd"), 1, "error: ValueError: odd\n(unexpected; run with --debug for the traceback)\n"),
        (KeyboardInterrupt(), 130, "error: interrupted\n"),
    ],
)  # fmt: skip
def test_errors_become_a_message_and_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, code: int, says: str
) -> None:
    command(monkeypatch, raises(error))
    assert main(["tasks"]) == code
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", says)


@pytest.mark.parametrize("words", [["--debug", "tasks"], ["tasks", "--debug"]])
def test_debug_shows_the_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    command(monkeypatch, raises(DataError("2 faults")))
    assert main(words) == 1
    message = capsys.readouterr().err
    assert message.startswith("Traceback (most recent call last):")
    assert message.endswith("error: 2 faults\n")


@pytest.mark.parametrize(
    ("words", "usage", "says"),
    [
        (["cache", "--no-such-option"], "Usage: dsplit cache", "No such option: --no-such-option"),
        (["caceh"], "Usage: dsplit", "No such command 'caceh'. Did you mean 'cache'?"),
        (["train", "--rank", "x"], "Usage: dsplit train", "--rank"),
    ],
)
def test_a_wrong_command_line_shows_the_usage(
    capsys: pytest.CaptureFixture[str], words: list[str], usage: str, says: str
) -> None:
    assert main(words) == 2
    message = capsys.readouterr().err
    assert message.startswith(usage)
    assert says in message
    assert re.search(r"Try 'dsplit( \w+)? -h' for help\.\n$", message)


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"dsplit {__version__}\n"
    assert main(["-h"]) == 0
    short = capsys.readouterr().out
    assert main(["--help"]) == 0
    assert capsys.readouterr().out == short
    assert all(f"│ {name} " in short for name in cli.COMMANDS)
    assert main([]) == 2
    assert "Usage: dsplit" in capsys.readouterr().out
    for name in cli.COMMANDS:
        assert main([name, "-h"]) == 0
        assert f"Usage: dsplit {name}" in capsys.readouterr().out


def test_stdout_holds_the_result_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def noisy(given: Given) -> None:
        def work() -> dict:
            print("a library talks")
            return {"rows": 3, "path": Path("[a]")}

        show(given, work, lambda result: f"{result['rows']} rows in {result['path']}")

    command(monkeypatch, noisy)
    assert main(["tasks", "--json"]) == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ('{"rows": 3, "path": "[a]"}\n', "a library talks\n")
    assert main(["tasks"]) == 0
    assert capsys.readouterr().out == "3 rows in [a]\n"
    monkeypatch.setenv("RANK", "1")
    assert main(["tasks", "--json"]) == 0
    assert capsys.readouterr().out == ""


def test_the_other_processes_of_a_launch_let_the_main_one_speak_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(cli.time, "sleep", waited.append)
    monkeypatch.setenv("RANK", "1")
    command(monkeypatch, raises(DataError("2 faults")))
    assert main(["tasks"]) == 1
    assert waited == [cli.OTHERS_WAIT]
    assert capsys.readouterr().err == "error: process 1: 2 faults\n"


def test_a_reader_that_goes_away_is_no_error() -> None:
    script = f"{sys.executable} -m dsplit tasks --json | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    assert done.returncode in (0, 1)  # 0 if it had written before the reader went


def test_ctrl_c_ends_with_130() -> None:
    code = (
        "import sys, time, dsplit.commands.tasks as module; from dsplit.cli import main\n"
        "from dsplit.commands.options import takes\n"
        "module.tasks = takes()(lambda given: (print('ready', flush=True), time.sleep(60)))\n"
        "sys.exit(main(['tasks']))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _, message = process.communicate(timeout=30)
    assert (process.returncode, message) == (130, "error: interrupted\n")


def cpu_ms(words: list[str], times: int = 7) -> float:
    """The CPU time of a process, in ms: the least of several, which other work on the machine disturbs least."""
    spent = []
    for _ in range(times):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(words, stdout=subprocess.DEVNULL, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return 1000 * min(spent)


@pytest.mark.parametrize(("words", "bare"), [(["--help"], ["--help"]), (["tasks"], ["a"])])
def test_it_costs_little_more_than_a_bare_typer_app(tmp_path: Path, words: list[str], bare: list[str]) -> None:
    (tmp_path / "bare.py").write_text(BARE)
    ours = cpu_ms([sys.executable, "-m", "dsplit", *words])
    assert ours - cpu_ms([sys.executable, str(tmp_path / "bare.py"), *bare]) <= 60


@pytest.mark.parametrize(
    "words", [["--help"], ["tasks"], ["tasks", "--model", "qwen-image", "--json"], ["train", "-h"]]
)
def test_it_never_imports_torch(words: list[str]) -> None:
    code = (
        f"import sys; from dsplit.cli import main; code = main({words!r})\n"
        "print(sorted({'torch', 'numpy', 'diffusers', 'PIL'} & set(sys.modules)), code, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr == "[] 0\n"


@pytest.mark.parametrize(
    ("line", "offers"),
    [
        ("dsplit t", {"train", "tasks"}),
        ("dsplit train --lora-f", {"--lora-format"}),
        ("dsplit train --lora-format c", {"comfyui"}),
        ("dsplit train --lora_", set()),
    ],
)
def test_completion(line: str, offers: set[str]) -> None:
    environment = {
        **os.environ,
        "_DSPLIT_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(line.count(" ")),
    }
    code = f"import sys; from dsplit.cli import main; sys.exit(main({line.split()[1:]!r}))"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert set(done.stdout.split()) == offers


@pytest.mark.parametrize("what", ["completions", "docs"])
def test_generated_files_are_up_to_date(what: str) -> None:
    for path, text in GENERATED[what]().items():
        assert path.read_text(encoding="utf-8") == text, f"run `make {what}`"


def test_the_page_of_the_references_options_has_them_all() -> None:
    page = (ROOT / "docs" / "reference-options.md").read_text(encoding="utf-8")
    rows = {line.split("|")[1]: line.split("|")[2] for line in page.splitlines() if line.startswith("| `--")}
    for name in REFERENCE:
        found = [here for there, here in rows.items() if f"`--{name}`" in there or f"`--{name} " in there]
        assert found, name
        if ours := RENAMED.get(name.replace("_", "-")):
            assert f"`--{ours}`" in found[0]
