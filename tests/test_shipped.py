"""What comes with the package for a model drafts by default on the command line, and for that model alone."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from conftest import BuildEngine
from sonar_engine.cli import main
from sonar_engine.cli.options import load_drafting_options, load_options
from sonar_engine.config import EngineConfig, SpeculativeConfig
from sonar_engine.drafters import shipped
from sonar_engine.drafters.shipped import list_shipped, shipped_line
from sonar_engine.errors import ConfigError, SonarError
from sonar_engine.models.registry import KNOWN_MODELS
from sonar_engine.types import SamplingParams
from tiny_models import make_tiny
from training_runs import fit, fit_config

GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)


@pytest.fixture(scope="module")
def exported(tiny_folder: Path, tiny_states: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head and a draft model for the tiny model, as `sonar train fit` leaves them."""
    out = tmp_path_factory.mktemp("exported")
    fit(fit_config(tiny_folder, tiny_states, out=out, max_steps=2))
    draft = {"kind": "draft", "num_layers": 2, "draft_vocab_size": 8192}
    fit(fit_config(tiny_folder, tiny_states, out=out / "of_draft", max_steps=2, **draft))
    (out / "of_draft" / "draft").rename(out / "draft")
    return out


@pytest.fixture
def heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in place of the package's own."""
    folder = tmp_path / "heads"
    folder.mkdir()
    monkeypatch.setattr(shipped, "HEADS", folder)
    return folder


@pytest.fixture
def with_head(heads: Path, exported: Path) -> Path:
    shutil.copytree(exported / "head", heads / "tiny-mtp")
    return heads


def configured(model: Path | str, **options: str) -> EngineConfig:
    return load_drafting_options({"model": str(model), **options}, "adaptive").engine


def set_target(folder: Path, **fields: str) -> None:
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    raw["trained_for"] |= fields
    path.write_text(json.dumps(raw))


def test_every_folder_of_the_package_is_for_a_known_model() -> None:
    known = {model.file_sha256 for model in KNOWN_MODELS.values()}
    assert (shipped.HEADS / "README.md").exists()
    assert all(drafter.target.sha256 in known for drafter in list_shipped())


def test_without_a_folder_nothing_drafts(heads: Path, tiny_folder: Path) -> None:
    config = EngineConfig(model=str(tiny_folder))
    assert list_shipped() == []
    assert configured(tiny_folder) == config
    assert shipped_line(config) is None


def test_the_head_of_the_model_is_the_default_and_any_option_wins(with_head: Path, tiny_folder: Path) -> None:
    found = configured(tiny_folder)
    assert found.speculative == SpeculativeConfig(
        method="mtp", model="shipped", num_speculative_tokens=3, draft_length="adaptive", prompt_lookup=True
    )
    line = shipped_line(found)
    assert line is not None
    assert "--spec-method none" in line
    assert str(tiny_folder) in line
    assert configured(tiny_folder, spec_method="none").speculative == SpeculativeConfig()
    assert configured(tiny_folder, spec_method="ngram").speculative == SpeculativeConfig(method="ngram")
    assert configured(tiny_folder, speculative_config="{}").speculative == SpeculativeConfig()
    assert configured(tiny_folder, tokenizer=str(tiny_folder)).speculative == SpeculativeConfig()


def test_what_is_measured_and_what_is_made_in_python_drafts_when_asked_alone(
    with_head: Path, tiny_folder: Path, build_tiny: BuildEngine
) -> None:
    assert load_options({"model": str(tiny_folder)}).engine.speculative == SpeculativeConfig()
    assert build_tiny().info.drafter == "none"


def test_named_it_takes_the_options_given_and_its_own_for_the_rest(with_head: Path, tiny_folder: Path) -> None:
    speculative = configured(tiny_folder, spec_model="shipped", num_speculative_tokens="2").speculative
    assert speculative == SpeculativeConfig(
        method="mtp", model="shipped", num_speculative_tokens=2, draft_length="adaptive", prompt_lookup=True
    )
    whole = '{"method": "mtp", "model": "shipped", "draft_length": "fixed", "prompt_lookup": false}'
    speculative = configured(tiny_folder, speculative_config=whole).speculative
    assert (speculative.num_speculative_tokens, speculative.draft_length) == (3, "fixed")
    assert not speculative.prompt_lookup


def test_heads_come_before_draft_models_and_both_can_be_named(
    with_head: Path, exported: Path, tiny_folder: Path
) -> None:
    shutil.copytree(exported / "draft", with_head / "a-draft")
    assert configured(tiny_folder).speculative.method == "mtp"
    assert configured(tiny_folder, spec_method="draft_model", spec_model="shipped").speculative.model == "shipped"
    shutil.rmtree(with_head / "tiny-mtp")
    assert configured(tiny_folder).speculative.method == "draft_model"


@pytest.mark.parametrize("kind", ["head", "draft"])
def test_the_engine_drafts_with_it_and_gives_the_same_tokens(
    heads: Path, exported: Path, kind: str, tiny_folder: Path, build_tiny: BuildEngine
) -> None:
    shutil.copytree(exported / kind, heads / kind)
    method = "mtp" if kind == "head" else "draft_model"
    engine = build_tiny(speculative=SpeculativeConfig(method=method, model="shipped", num_speculative_tokens=3))
    prompt = engine.tokenizer.encode("the cat sat on")
    assert engine.generate([prompt], GREEDY)[0].token_ids == build_tiny().generate([prompt], GREEDY)[0].token_ids
    assert engine.stats().num_draft_tokens > 0


def test_other_weights_have_no_default_and_a_clear_error_when_it_is_named(with_head: Path, tmp_path: Path) -> None:
    other = make_tiny("smollm", tmp_path / "other", tokenizer=True, initializer_range=0.03)
    assert configured(other).speculative == SpeculativeConfig()
    with pytest.raises(ConfigError, match=r"no MTP head for '.*other' comes with Sonar Engine \(there are some for"):
        configured(other, spec_model="shipped")
    with pytest.raises(ConfigError, match=r"no draft model for .* comes with Sonar Engine \(there is none\)"):
        configured(other, spec_method="draft_model", spec_model="shipped")
    assert configured(tmp_path / "nowhere").speculative == SpeculativeConfig()
    assert configured("owner/name").speculative == SpeculativeConfig()


def test_a_library_that_names_it_in_vain_is_told(heads: Path, build_tiny: BuildEngine) -> None:
    with pytest.raises(ConfigError, match=r"no MTP head for .* comes with Sonar Engine"):
        build_tiny(speculative=SpeculativeConfig(method="mtp", model="shipped"))


def test_a_known_model_is_recognised_before_it_is_fetched(
    with_head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SONAR_CACHE", str(tmp_path / "cache"))
    assert configured("smollm2-135m").speculative.method == "none"
    set_target(with_head / "tiny-mtp", name="smollm2-135m", sha256=KNOWN_MODELS["smollm2-135m"].file_sha256)
    assert configured("smollm2-135m").speculative.method == "mtp"
    assert not (tmp_path / "cache").exists()
    same_name = make_tiny("smollm", tmp_path / "smollm2-135m", tokenizer=True)
    assert configured(same_name).speculative.method == "none"


def test_a_folder_that_does_not_tell_its_target_is_named(with_head: Path, tiny_folder: Path) -> None:
    set_target(with_head / "tiny-mtp", more="")
    with pytest.raises(SonarError, match=r"tiny-mtp.*target must have"):
        configured(tiny_folder)


def test_generate_says_so_and_how_to_turn_it_off(
    with_head: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--dtype", "fp32", "--device", "cpu", "--num-threads", "1", "--max-model-len", "128"]
    asked = ["generate", "--model", str(tiny_folder), *small, "--prompt", "the cat", "--max-tokens", "12", "--json"]
    drafted = []
    for options in ([], ["--spec-method", "none"]):
        monkeypatch.setattr(sys, "argv", ["sonar", *asked, "--temperature", "0", "--ignore-eos", *options])
        with pytest.raises(SystemExit):
            main()
        out, err = capsys.readouterr()
        assert ("--spec-method none turns it off" in err) == (not options)
        drafted.append(json.loads(out)["metrics"]["speculative_decoding"]["num_draft_tokens"])
    assert drafted[0] > 0
    assert drafted[1] == 0


def test_the_exported_folder_tells_nothing_of_the_machine(exported: Path, tiny_folder: Path) -> None:
    for kind in ("head", "draft"):
        texts = [path.read_text() for path in (exported / kind).iterdir() if path.suffix in (".json", ".md")]
        assert len(texts) >= 2
        for text in texts:
            assert not any(str(folder) in text for folder in (tiny_folder.parent, exported, Path.home()))
        note = (exported / kind / "README.md").read_text()
        assert f"for {tiny_folder.name}" in note
        assert "2 steps on " in note
        assert "`learning_rate` 0.0005" in note
        assert "That of the target." in note
