"""The `downrange` command where its standard streams are not those of a terminal: closed, full, or leading nowhere."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from downrange import __version__

NOBODY = "127.0.0.1:1"


def shell(line: str) -> subprocess.CompletedProcess[str]:
    """Run a line in which `downrange` stands for ours; what the shell itself says is in `stderr`, too."""
    command = f"downrange() {{ '{sys.executable}' -m downrange \"$@\"; }}; {line}"
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)


def test_the_package_runs_as_a_module() -> None:
    done = shell("downrange --version")
    assert done.returncode == 0
    assert done.stdout.startswith(f"downrange {__version__} (")


def test_no_input_means_no_messages() -> None:
    for line in ("downrange produce orders -n {} </dev/null", "downrange produce orders -n {} <&-"):
        done = shell(line.format(NOBODY))
        assert (done.returncode, done.stdout, done.stderr) == (0, "sent 0 messages to orders\n", "")


@pytest.mark.parametrize("line", ["downrange --version", "downrange mqadmin", "downrange --help"])
def test_output_that_cannot_be_written_is_told_in_one_line(line: str) -> None:
    done = shell(f"{line} >/dev/full")
    assert (done.returncode, done.stderr) == (1, "downrange: No space left on device\n")


def test_a_reader_that_has_seen_enough_is_no_error_to_speak_of() -> None:
    done = shell("downrange mqadmin | true")
    assert (done.returncode, done.stderr) == (0, "")


def test_closed_streams_do_not_end_in_an_abort() -> None:
    # The number of a closed stream would go to a socket, and libuv gives up the process when it closes such a one.
    done = shell(f"downrange topic list -n {NOBODY} <&- >&-")
    assert done.returncode == 1
    assert done.stderr.startswith("downrange: no name server answers")
    assert done.stderr.count("\n") == 1
    assert shell(f"downrange topic list -n {NOBODY} <&- >&- 2>&-").returncode == 1


def test_letters_a_terminal_does_not_have_are_question_marks() -> None:
    program = "import downrange.cli.main as main; main._open_standard_streams(); print('1 µs')"
    done = shell(f"PYTHONIOENCODING=ascii '{sys.executable}' -c \"{program}\"")
    assert (done.returncode, done.stdout) == (0, "1 ?s\n")


def test_an_argument_that_is_not_text_is_told_in_one_line() -> None:
    done = shell(f"downrange topic list -n $'\\xff:1'; downrange topic route $'\\xff' -n {NOBODY}")
    assert done.returncode in (1, 2)
    assert [line[:11] for line in done.stderr.splitlines()] == ["downrange: "] * 2


def test_a_file_that_cannot_be_a_store_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    done = shell(
        f"downrange broker -n {NOBODY} --port 0 --metrics-port -1 --grpc-port -1 --data {file} --log-level ERROR"
    )
    assert done.returncode == 1
    assert done.stderr.startswith(f"downrange: cannot use {file} as a store")
    assert done.stderr.count("\n") == 1
