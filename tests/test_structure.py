"""The rules of the source tree: imports point one way, heavy packages stay in their place, public calls are typed."""

import ast
import os
import subprocess
import sys
import tarfile
import zipfile
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "titan_mxfp8"
# A module may import from its own layer and the ones after it, never from another of its layer: each TorchTitan has its
# adapter.
ADAPTERS = "plugin titan03", "titan"
FOLDERS = "doctor", "tools", *ADAPTERS, "modules", "moe", "ops", "backends", "recipe", "format", "workarounds"
LAYERS = [folders.split() for folders in FOLDERS]
UNDER = {"triton": ("backends/", "moe/kernels.py"), "torchtitan": ("plugin/", "titan03/", "tools/", "workarounds/")}


@cache
def package_sources() -> dict[str, ast.Module]:
    """The modules of the package, by their paths in it."""
    return {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def imports(relative: str) -> list[str]:
    names = []
    for node in ast.walk(package_sources()[relative]):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{relative}: relative import"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def layer(dotted: str) -> tuple[int, str] | None:
    """The place of a module's folder among the layers, and its name."""
    part = dotted.split(".")[1] if "." in dotted else ""
    return next(((place, part) for place, folders in enumerate(LAYERS) if part in folders), None)


def test_imports_point_one_way_and_triton_and_torchtitan_are_in_few_folders() -> None:
    seen = 0
    for relative in package_sources():
        own = layer(f"titan_mxfp8.{relative.removesuffix('.py').replace('/', '.')}")
        for name in imports(relative):
            assert relative.startswith(UNDER.get(name.split(".")[0], "")), f"{relative} imports {name}"
            if own is not None and name.startswith("titan_mxfp8."):
                target = layer(name)
                seen += 1
                allowed = target is None or target == own or target[0] > own[0]
                assert allowed, f"{relative} imports {name}"
    assert seen > 20


def test_the_top_level_holds_nothing_else() -> None:
    """An archive that a script had left there was committed once."""
    root = PACKAGE.parent
    if not (root / ".git").exists():
        pytest.skip("not a clone of the repository")
    tracked = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True, check=True)
    folders = {"titan_mxfp8", "train_configs", "scripts", "tests", "results", ".ci", ".github"}
    files = {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "pyproject.toml"}
    settings = {".gitignore", ".pre-commit-config.yaml", ".shellcheckrc"}
    assert {line.partition("/")[0] for line in tracked.stdout.splitlines()} == folders | files | settings


@pytest.mark.integration
def test_importing_the_package_does_not_import_torchtitan() -> None:
    # triton is not asked about: torch imports it for its compiler, where it is installed
    code = "import sys, titan_mxfp8; print('torchtitan' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


@pytest.mark.integration
def test_the_public_api_is_typed() -> None:
    pytest.importorskip("mypy")
    command = [sys.executable, "-m", "mypy", f"--cache-dir={os.devnull}"]
    done = subprocess.run(command, cwd=PACKAGE.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_public_function_has_a_docstring_and_type_hints() -> None:
    for relative, tree in package_sources().items():
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and not node.decorator_list:
                assert ast.get_docstring(node) or len(node.body) <= 3, f"{relative}: {node.name} has no docstring"
                hints = [arg.annotation for arg in (*node.args.args, *node.args.kwonlyargs)]
                assert all(hints) and node.returns is not None, f"{relative}: {node.name} lacks type hints"


def test_files_and_lists_of_parameters_stay_short() -> None:
    for relative, tree in package_sources().items():
        assert len((PACKAGE / relative).read_text().splitlines()) <= 500, relative
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name != "mxfp8_moe":  # a public one, as are its arguments
                is_kernel = any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
                count = len((*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs))
                assert is_kernel or count <= 12, f"{relative}: {node.name} has {count} parameters"


def test_the_tour_names_every_file() -> None:
    tour = (PACKAGE / "README.md").read_text()
    for relative in package_sources():
        folder, _, name = relative.rpartition("/")
        assert f"{name}`" in tour or "workarounds" in folder or name == "__init__.py", relative


@pytest.mark.integration
def test_what_is_built_holds_all_that_it_needs_and_leaves_nothing_behind(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    root = PACKAGE.parent
    before = set(root.iterdir())
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(tmp_path)]
    subprocess.run(command, cwd=root, check=True, capture_output=True)
    assert set(root.iterdir()) == before
    (archive,), (wheel,) = tmp_path.glob("*.tar.gz"), tmp_path.glob("*.whl")
    with tarfile.open(archive) as packed:
        sources = {name.partition("/")[2] for name in packed.getnames()}
    for needed in ("tests/training.py", "tests/README.md", "scripts/study/runs.py", "train_configs/debug_llama4.toml"):
        assert (root / needed).is_file() and needed in sources
    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
    assert {"titan_mxfp8/py.typed", "titan_mxfp8/measured.csv"} <= set(names)
    modules = {name for name in names if name.endswith(".py")}
    assert modules == {f"titan_mxfp8/{relative}" for relative in package_sources()}
