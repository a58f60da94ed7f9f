"""Our package names are generic; this project must own them, and no dependency may claim them."""

import importlib
import importlib.metadata
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PACKAGES = PROJECT["tool"]["importlinter"]["root_packages"]


@pytest.mark.parametrize("name", PACKAGES)
def test_package_is_ours(name):
    package = importlib.import_module(name)
    assert Path(package.__file__).resolve().parent == ROOT / name


def test_no_installed_distribution_claims_our_names():
    owners = importlib.metadata.packages_distributions()
    claimed = {name: set(owners.get(name, [])) - {"twostroke"} for name in PACKAGES}
    assert not {name: others for name, others in claimed.items() if others}


def test_every_folder_with_python_is_a_listed_package():
    tooling = {"tests", "benchmarks", "scripts", "examples", "docs"}
    folders = {
        path.name
        for path in ROOT.iterdir()
        if path.is_dir() and not path.name.startswith(".") and any(path.glob("*.py"))
    }
    assert folders - tooling == set(PACKAGES)


def test_lists_of_packages_agree():
    found = PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]
    assert {pattern.rstrip("*") for pattern in found} == set(PACKAGES)
    assert set(PROJECT["tool"]["mypy"]["packages"]) == set(PACKAGES)
    layers = " ".join(PROJECT["tool"]["importlinter"]["contracts"][0]["layers"])
    assert set(layers.replace("|", " ").split()) == set(PACKAGES)


def test_every_package_is_typed():
    assert [name for name in PACKAGES if not (ROOT / name / "py.typed").is_file()] == []


def test_router_extra_stays_small():
    """The router's image holds no torch: neither its extra nor the base may name it."""
    project = PROJECT["project"]
    named = " ".join(project["dependencies"] + project["optional-dependencies"]["router"])
    assert "torch" not in named
    assert "ray" not in named


def test_no_package_of_ours_shadows_the_standard_library():
    import sys

    assert set(PACKAGES).isdisjoint(sys.stdlib_module_names)


def test_command_is_installed():
    (entry,) = importlib.metadata.entry_points(group="console_scripts", name="twostroke")
    assert entry.value == PROJECT["project"]["scripts"]["twostroke"]
    assert callable(entry.load())


def test_tests_are_no_packages():
    """A tests/router package would shadow ours."""
    assert list((ROOT / "tests").rglob("__init__.py")) == []
