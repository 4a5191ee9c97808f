"""Compiles `downrange._steps` while a wheel is built, where there is a C compiler; without one it is pure Python.

See docs/how-to/compiled.md. Nothing is downloaded, and a failure of the compiler is never a failure of the build.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCES = Path("src", "downrange", "_compiled")
MODULE = "_steps" + str(sysconfig.get_config_var("EXT_SUFFIX") or ".so")


def compile_steps(root: Path, directory: Path) -> str | None:
    """Put the module into `directory`; why there is none, else None."""
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    headers = sysconfig.get_paths()["include"]
    sources = sorted(str(path) for path in (root / SOURCES).glob("*.c"))
    flags = ["-O3", "-fPIC", "-shared", "-fvisibility=hidden", *shlex.split(os.environ.get("CFLAGS", ""))]
    command = [*compiler, *flags, f"-I{headers}", *sources, "-o", str(directory / MODULE)]
    if not Path(headers, "Python.h").exists():
        return f"the headers of this Python are not in {headers}"
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  # the user's own CC
    except OSError as error:
        return f"{compiler[0]} cannot be run: {error.strerror}"
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"{compiler[0]} ended with {done.returncode}"])[-1]
    return None


class CompiledSteps(BuildHookInterface[Any]):
    """Adds the compiled module to a wheel; to an editable one by putting it next to the Python files."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        self._directory = tempfile.TemporaryDirectory()
        made = Path(self._directory.name, MODULE)
        problem = compile_steps(root, made.parent)
        in_place = root / "src" / "downrange" / MODULE
        if version == "editable":
            in_place.unlink(missing_ok=True)  # one that was made of older sources would be worse than none
        if problem is not None:
            self.app.display_warning(f"downrange: pure Python, without the compiled steps: {problem}")
            return
        if version == "editable":
            # A new file, not a changed one: a broker that runs keeps what it has mapped.
            in_place.write_bytes(made.read_bytes())
            in_place.chmod(0o755)
        else:
            build_data["force_include"][str(made)] = f"downrange/{MODULE}"
            build_data["pure_python"] = False
            build_data["infer_tag"] = True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        self._directory.cleanup()
