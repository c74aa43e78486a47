"""The shape of the repository: imports go down only, the wheel carries the tree, files stay readable."""

from __future__ import annotations

import ast
import importlib.util
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {"sarathi_jax": "sarathi_jax", "models": "sarathi_jax.models", "attention": "sarathi_jax.attention"}
TOP = (*PACKAGES, "examples", "tests", ".ci", "pyproject.toml", "README.md", "WORKSPACE.md", "LICENSE", ".gitignore")

# Module of sarathi_jax -> level. "x.*" is every module below x; the longest entry that fits a module counts.
# 0: plain Python. 1: the host, no jax. 2: the device. 3: engines and their faces. 4: nothing imports these.
LEVELS = {
    "config": 0,
    "outputs": 0,
    "request": 0,
    "shapes": 0,
    "versions": 0,
    "attention_cost": 0,
    "axes": 0,
    "budget": 1,
    "capacity": 1,
    "channel": 1,
    "chat_template": 1,
    "cost_fit": 1,
    "cost_model": 1,
    "detokenizer": 1,
    "driver": 1,
    "hardware": 1,
    "known_models": 1,
    "intake": 1,
    "memory_plan": 1,
    "metrics": 1,
    "models": 1,  # the package alone: empty
    "models.checkpoint": 1,
    "models.families": 1,
    "models.families.*": 1,
    "models.gguf_config": 1,
    "models.gguf_file": 1,
    "models.groups": 1,
    "models.hf_config": 1,
    "models.hf_folder": 1,
    "models.hub": 1,
    "models.parts": 1,
    "models.random_model": 1,
    "models.saved": 1,
    "models.weight_specs": 1,
    "pages": 1,
    "prefix_cache": 1,
    "progress": 1,
    "roofline": 1,
    "replay": 1,
    "schedulers": 1,
    "schedulers.*": 1,
    "simulator": 1,
    "simulator_replica": 1,
    "stage_split": 1,
    "stages": 1,
    "tokenizer": 1,
    "trace": 1,
    "workload": 1,
    "workload_files": 1,
    "workload_lengths": 1,
    "attention": 2,
    "attention.*": 2,
    "batch": 2,
    "device": 2,
    "models.*": 2,
    "parallel": 2,
    "pipeline": 2,
    "profiler": 2,
    "runner": 2,
    "arrays": 2,
    "sampler": 2,
    "async_engine": 3,
    "benchmark": 3,
    "distributed": 3,
    "engine": 3,
    "flight": 3,
    "generation": 3,
    "llm": 3,
    "replicas": 3,
    "server": 3,
    "disagg": 4,
    "disagg.*": 4,
    "offload": 4,
    "offload.*": 4,
    "parrot": 4,
    "parrot.*": 4,
}
DEVICE_LIBRARIES = {"jax", "jaxlib", "flax", "orbax", "optax"}


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def modules() -> dict[str, Path]:
    """Every module of the package by its name below sarathi_jax ("" is the package itself)."""
    found = {}
    for folder, package in PACKAGES.items():
        for path in python_files(folder):
            parts = [*package.split("."), *path.relative_to(ROOT / folder).with_suffix("").parts]
            found[".".join(parts[1:-1] if parts[-1] == "__init__" else parts[1:])] = path
    return found


def level(name: str) -> int | None:
    if name in LEVELS:
        return LEVELS[name]
    parents = [name.rsplit(".", n)[0] + ".*" for n in range(1, name.count(".") + 1)]
    return next((LEVELS[p] for p in parents if p in LEVELS), None)


def imported(path: Path, package: str = "") -> set[str]:
    """Full names a file imports, anywhere in it; `package` is where its relative imports start."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names |= {f"{base}.{alias.name}" for alias in node.names}
    return names


def internal_imports(known: dict[str, Path]) -> dict[str, set[str]]:
    """Module -> modules of the package it imports ("" where it takes a name from sarathi_jax itself)."""
    result = {}
    for name, path in known.items():
        full = f"sarathi_jax.{name}".rstrip(".")
        package = full if path.name == "__init__.py" else full.rpartition(".")[0]
        result[name] = set()
        for target in imported(path, package):
            if target.split(".")[0] == "sarathi_jax":
                below = target.partition(".")[2]
                while below not in known:  # "config.ModelConfig" is a name in config
                    below = below.rpartition(".")[0]
                result[name].add(below)
    return result


MODULES = modules()
IMPORTS = internal_imports(MODULES)


def test_the_tests_run_on_this_checkout():
    """With an environment that has another checkout installed they would judge a mixture of the two."""
    for folder, package in PACKAGES.items():
        [path] = {str(Path(path).resolve()) for path in importlib.import_module(package).__path__}
        assert path == str(ROOT / folder), f"{package} is {path}: run pip install -e in {ROOT}"


def test_every_module_has_a_level():
    unlisted = sorted(name for name in MODULES if name and level(name) is None)
    assert not unlisted, f"add {unlisted} to LEVELS in {Path(__file__).name}, at the level DESIGN gives them"


def test_imports_go_down_only():
    wrong = []
    for name, targets in IMPORTS.items():
        if not name:
            continue  # the public face
        for target in targets - {name}:
            if target == "":
                wrong.append(f"{name} imports from sarathi_jax itself: name the module that defines it")
            elif (level(target) or 0) > (level(name) or 0):
                wrong.append(f"{name} (level {level(name)}) imports {target} (level {level(target)})")
            elif level(target) == 4 and target.split(".")[0] != name.split(".")[0]:
                wrong.append(f"{name} imports {target}: nothing imports level 4")
            elif name.startswith("attention") and not target.startswith("attention") and target != "arrays":
                wrong.append(f"{name} imports {target}: attention stands alone")
            elif name == "parallel" and target.startswith("models"):
                wrong.append(f"{name} imports {target}: models stand on parallel")
    assert not wrong, "\n".join(sorted(wrong))


def test_no_two_modules_import_each_other():
    """Along any chain of imports: a cycle works or fails by which module is imported first."""
    done: set[str] = set()

    def visit(name: str, chain: tuple[str, ...]) -> None:
        assert name not in chain, " -> ".join([*chain[chain.index(name) :], name])
        if name not in done:
            for target in sorted(IMPORTS[name] - {name, ""}):
                visit(target, (*chain, name))
            done.add(name)

    for name in MODULES:
        visit(name, ())


def test_plain_modules_use_the_standard_library_only():
    allowed = {*sys.stdlib_module_names, "sarathi_jax"}
    for name, path in MODULES.items():
        if name and level(name) == 0:
            others = {target.split(".")[0] for target in imported(path, "sarathi_jax")} - allowed
            assert not others, f"{name} is plain Python (level 0) but imports {sorted(others)}"


def test_host_modules_do_not_name_jax():
    for name, path in MODULES.items():
        if name and level(name) in (0, 1):
            device = {target for target in imported(path) if target.split(".")[0] in DEVICE_LIBRARIES}
            assert not device, f"{name} is host code (level {level(name)}) but imports {sorted(device)}"


def test_importing_the_host_does_not_import_jax(tmp_path):
    """A simulation, or `import sarathi_jax` for its dataclasses, starts at once and runs where jax does not."""
    host = [f"sarathi_jax.{name}".rstrip(".") for name in ["", *sorted(MODULES)] if not name or level(name) in (0, 1)]
    code = """
import importlib, sys
device, host = (set(argument.split(",")) for argument in sys.argv[1:])
for name in sorted(host):
    importlib.import_module(name)
    if found := device & sys.modules.keys():
        sys.exit(f"importing {name} imported {sorted(found)}")
"""
    argv = [sys.executable, "-c", code, ",".join(DEVICE_LIBRARIES), ",".join(host)]
    run = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_nobody_imports_a_second_copy():
    """`models` and `attention` are importable where pytest runs, as other modules than sarathi_jax.models."""
    for path in python_files(*PACKAGES, "examples", "tests"):
        second = {name for name in imported(path) if name.split(".")[0] in ("models", "attention")}
        assert not second, f"{path.relative_to(ROOT)} imports {sorted(second)}: write sarathi_jax.models, .attention"


def test_shapes_are_checked_in_tests():
    """conftest's import hook reaches the modules it names, through the editable install's own importer."""
    for name, path in MODULES.items():
        if path.name != "__init__.py" and (name == "sampler" or name.startswith(("attention.", "models."))):
            spec = importlib.util.find_spec(f"sarathi_jax.{name}")
            assert spec is not None
            assert "jaxtyping" in type(spec.loader).__module__, f"{name} is imported unchecked"


def test_wheel_carries_the_tree(tmp_path):
    """A package that pyproject.toml does not list imports from a checkout but is missing where users install."""
    source, out = tmp_path / "source", tmp_path / "out"
    junk = shutil.ignore_patterns("__pycache__", "*.egg-info", ".*")
    for folder in PACKAGES:
        shutil.copytree(ROOT / folder, source / folder, ignore=junk)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    expected = {
        f"{package.replace('.', '/')}/{path.relative_to(source / folder).as_posix()}"
        for folder, package in PACKAGES.items()
        for path in (source / folder).rglob("*")
        if path.is_file()
    }
    build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    run = subprocess.run([sys.executable, "-c", build, out], cwd=source, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    [wheel] = out.glob("*.whl")
    files = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert "sarathi_jax/py.typed" in files
    assert files == expected, f"missing: {sorted(expected - files)}, unexpected: {sorted(files - expected)}"


def test_files_can_be_read_in_one_sitting():
    for path in python_files(*PACKAGES, "examples"):
        lines, most = len(path.read_text(encoding="utf-8").splitlines()), 80 if "examples" in path.parts else 450
        assert lines <= most, f"{path.relative_to(ROOT)} has {lines} lines, more than {most}"


@pytest.mark.parametrize("command", ['pip install -e ".[dev]"', "python -m pytest"])
def test_readme_gives_the_commands_that_ci_runs(command):
    readme, ci = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", ".ci/run"))
    assert command in [line.strip() for line in readme.splitlines()], f"README.md lacks a line {command}"
    assert re.search(rf"^ *{re.escape(command)}( &&| \|\| status=1)?$", ci, re.MULTILINE), (
        f".ci/run does not run {command}"
    )


def test_no_file_names_an_index_host():
    """Users install from the index they have configured; a lock or a script that names a host goes around it."""
    hosts = [f"{host}.{'org'}".encode() for host in ("pypi", "pythonhosted", "npmjs", "debian", "conda-forge")]
    for top in TOP:
        path = ROOT / top
        for file in [path] if path.is_file() else sorted(path.rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts and file.suffix != ".pyc":
                named = [host.decode() for host in hosts if host in file.read_bytes().lower()]
                assert not named, f"{file.relative_to(ROOT)} names {named}"
