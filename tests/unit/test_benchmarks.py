"""The benchmarks are run by hand and seldom: here only that each still imports and starts."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = [path for path in sorted(FOLDER.glob("*.py")) if "__main__" in path.read_text()]


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.py")))
def test_every_module_imports(name, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))  # each puts the repository in front
    import_module(f"benchmarks.{name}")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_every_script_says_how_it_is_used(script, tmp_path):
    done = subprocess.run(
        [sys.executable, str(script), "--help"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage:")
    assert "--out" in done.stdout
