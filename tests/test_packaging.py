"""Both wheels work outside the checkout, and every version comes from Cargo.toml."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BUILD_SECONDS = 900


def run(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=BUILD_SECONDS, check=False)
    assert done.returncode == 0, f"{command}: {done.stderr[-2000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def version() -> str:
    return str(tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["version"])


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Wheels of the engine and of the kernels; the Rust build is the one that `make setup` made."""
    folder = tmp_path_factory.mktemp("wheels")
    maturin = [sys.executable, "-m", "maturin", "build", "--release", "--quiet", "--out", str(folder)]
    run(maturin, ROOT)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    run([*pip, "--wheel-dir", str(folder), str(ROOT / "kernels")], ROOT)
    return sorted(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheels: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with nothing but the two wheels unpacked by pip."""
    target = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target)]
    run([*pip, *map(str, wheels)], target)
    return target


def python(code: str, installed: Path) -> str:
    """Output of `code` with the installed wheels before everything else on the path, away from the checkout."""
    return run([sys.executable, "-c", f"import sys; sys.path.insert(0, {str(installed)!r}); {code}"], installed).strip()


@pytest.mark.timeout(BUILD_SECONDS)
def test_there_is_one_wheel_for_every_later_python(wheels: list[Path], version: str):
    names = [wheel.name for wheel in wheels]
    assert len(names) == 2
    assert names[0].startswith(f"sonar_engine-{version}-cp311-abi3-")
    assert names[1] == f"sonar_kernels-{version}-py3-none-any.whl"


@pytest.mark.timeout(BUILD_SECONDS)
def test_the_wheel_carries_prompts_types_stub_and_licence(wheels: list[Path]):
    names = set(zipfile.ZipFile(wheels[0]).namelist())
    wanted = {"py.typed", "_scheduler.pyi", "bench/prompts.jsonl", "engine.py"}
    assert {f"sonar_engine/{name}" for name in wanted} <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not any(name.startswith(("tests/", "bench/")) for name in names)


@pytest.mark.timeout(BUILD_SECONDS)
@pytest.mark.parametrize(("folder", "one"), [("heads", "README.md"), ("server/page", "index.html")])
def test_the_wheel_carries_all_that_lies_in_the_folders_of_data(wheels: list[Path], folder: str, one: str):
    names = set(zipfile.ZipFile(wheels[0]).namelist())
    package = ROOT / "python"
    files = [path for path in (package / "sonar_engine" / folder).rglob("*") if path.is_file()]
    wanted = {str(path.relative_to(package)) for path in files}
    assert f"sonar_engine/{folder}/{one}" in wanted
    assert wanted <= names


@pytest.mark.timeout(BUILD_SECONDS)
def test_the_installed_package_runs_away_from_the_checkout(installed: Path, version: str):
    code = "import sonar_engine.engine, sonar_kernels; print(sonar_engine.__version__, sonar_engine.__file__)"
    found_version, file = python(code, installed).split()
    assert found_version == version
    assert Path(file).is_relative_to(installed)


@pytest.mark.timeout(BUILD_SECONDS)
def test_the_versions_of_metadata_and_modules_agree(installed: Path, version: str):
    code = (
        "from importlib.metadata import distribution as d; print(d('sonar-engine').version, d('sonar-kernels').version)"
    )
    assert python(code, installed).split() == [version] * 2


@pytest.mark.timeout(BUILD_SECONDS)
def test_the_installed_command_measures_the_scheduler(installed: Path):
    code = "sys.argv = ['sonar', 'bench', 'scheduler', '--requests', '2', '--drafts', '1', '--steps', '5', '--json'];"
    output = python(code + "from sonar_engine.cli import main; main()", installed)
    assert '"us_per_step"' in output


@pytest.mark.parametrize("project", ["pyproject.toml", "kernels/pyproject.toml"])
def test_no_project_file_repeats_the_version(project: str):
    table = tomllib.loads((ROOT / project).read_text())["project"]
    assert "version" in table["dynamic"]
    assert "version" not in table


@pytest.mark.parametrize("crate", ["core", "runtime", "cpu", "python"])
def test_no_crate_repeats_the_version(crate: str):
    package = tomllib.loads((ROOT / "scheduler-rs" / crate / "Cargo.toml").read_text())["package"]
    assert package["version"] == {"workspace": True}


def test_continuous_integration_runs_lint_and_tests_of_the_makefile():
    script = ROOT / ".ci/run"
    assert os.access(script, os.X_OK)
    assert {"make lint", "make test"} <= set(script.read_text().splitlines())


def test_make_alone_lists_every_target():
    output = run(["make", "--no-print-directory"], ROOT)
    for target in ("setup", "demo", "serve", "test", "test-matrix", "lint", "bench", "size"):
        assert f"make {target} " in output
