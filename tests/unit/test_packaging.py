"""Our package names are generic; this project must own them, and no dependency may claim them."""

import ast
import importlib
import importlib.metadata
import re
import subprocess
import sys
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


def imports(path):
    """Full names of the modules a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def importers(module):
    """Our files that import `module` or something in it; generated ones do not count."""
    files = [path for name in PACKAGES for path in (ROOT / name).rglob("*.py")]
    return {
        str(path.relative_to(ROOT))
        for path in files
        if "_pb2" not in path.name
        and any(name == module or name.startswith(module + ".") for name in imports(path))
    }


def test_every_dependency_is_imported():
    """What nobody imports is not worth anybody's download."""
    project = PROJECT["project"]
    extras = project["optional-dependencies"]
    named = [*project["dependencies"], *extras["router"], *extras["worker"], *extras["cluster"]]
    wanted = {re.match(r"[\w-]+", text)[0].lower() for text in named}
    owners = importlib.metadata.packages_distributions()
    used = {
        owner.lower().replace("_", "-")
        for name in PACKAGES
        for path in (ROOT / name).rglob("*.py")
        for module in imports(path)
        for owner in owners.get(module.partition(".")[0], [])
    }
    assert wanted - used == set()


def test_torch_distributed_is_imported_in_two_places_only():
    found = importers("torch.distributed")
    assert found, "the search itself must work"
    assert {path for path in found if not path.startswith("parallel/")} <= {
        "kv_transfer/distributed.py"
    }


def test_grpc_is_imported_by_services_and_clients_only():
    found = importers("grpc")
    assert found, "the search itself must work"
    allowed = re.compile(r"protocol/.*|\w+/service\.py|\w+/\w+_client\.py")
    assert [path for path in found if not allowed.fullmatch(path)] == []


def test_ray_and_the_environment_are_reached_for_in_few_places():
    assert {path.partition("/")[0] for path in importers("ray")} == {"deploy"}
    readers = {
        str(path.relative_to(ROOT))
        for name in PACKAGES
        for path in (ROOT / name).rglob("*.py")
        if re.search(r"\bos\.(environ|getenv)\b", path.read_text(encoding="utf-8"))
    }
    # ray_cluster only writes what Ray's daemons inherit.
    assert readers <= {"deploy/config_file.py", "deploy/ray_cluster.py"}


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("deploy.cli", ["torch", "ray", "fastapi", "httpx"]),
        ("deploy.router_process", ["torch", "numpy", "ray", "httpx"]),
        ("deploy.workers", ["fastapi", "pydantic", "ray", "httpx"]),
    ],
)
def test_a_process_loads_only_what_its_image_holds(module, absent):
    program = f"import sys, {module}; print(*sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert set(absent).isdisjoint(found.stdout.split())


def test_no_package_of_ours_shadows_the_standard_library():
    assert set(PACKAGES).isdisjoint(sys.stdlib_module_names)


def test_command_is_installed():
    (entry,) = importlib.metadata.entry_points(group="console_scripts", name="twostroke")
    assert entry.value == PROJECT["project"]["scripts"]["twostroke"]
    assert callable(entry.load())


def test_tests_are_no_packages():
    """A tests/router package would shadow ours."""
    assert list((ROOT / "tests").rglob("__init__.py")) == []
