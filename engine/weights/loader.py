"""Fill a model's slots from a checkpoint: every slot once, every tensor used, or a named error."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from core.errors import ModelLoadError
from core.worker import Progress
from engine.models.interface import Model
from engine.weights.gguf import open_gguf
from engine.weights.safetensors import open_safetensors
from parallel.weights import HasWeightSlots, StoredTensor, WeightSlot

HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"


def open_checkpoint(model_path: str) -> Mapping[str, StoredTensor]:
    """Stored tensors by Hugging Face name. Raises ModelLoadError when there are none to read."""
    path = Path(model_path)
    return open_gguf(path) if path.is_file() else open_safetensors(path)


def has_own_head(checkpoint: Mapping[str, StoredTensor]) -> bool:
    """Whether the LM head is stored and is not the embedding, whatever the config says of tying:
    a fine-tune may have parted the two. Compares some rows."""
    head, embedding = (checkpoint.get(name) for name in (HEAD, EMBEDDING))
    if head is None or embedding is None or head.shape != embedding.shape:
        return False
    step = max(1, head.shape[0] // 16)
    rows = [slice(start, start + 1) for start in range(0, head.shape[0], step)]
    return not all(torch.equal(head.read(row), embedding.read(row)) for row in rows)


def load_weights(
    model: Model,
    checkpoint: Mapping[str, StoredTensor],
    progress: Progress | None = None,
    *,
    whole: Model | None = None,
) -> None:
    """Raises ModelLoadError naming every tensor that is missing, left over or of another shape;
    nothing is loaded then. Where `model` is one stage of a pipeline, `whole` are all of them, with
    no memory (torch's meta device): by it the checkpoint is judged, so that a tensor of another
    stage is none too many, and one of no stage is."""
    slots = weight_slots(model if whole is None else whole)
    wanted = {name: slot for name, slot in slots.items() if slot.required or name in checkpoint}
    _check_names(wanted, checkpoint, model.ignores)
    for name, slot in wanted.items():
        if checkpoint[name].shape != slot.shape:
            raise ModelLoadError(
                f"tensor {name} has shape {list(checkpoint[name].shape)}, "
                f"the model needs {list(slot.shape)}"
            )
    own = {name: slot for name, slot in weight_slots(model).items() if name in wanted}
    total = sum(math.prod(slot.shape) for slot in own.values())
    done = 0
    for name, slot in own.items():
        slot.load(checkpoint[name])
        done += math.prod(slot.shape)
        if progress is not None:
            progress("loading weights", done / total)


def weight_slots(model: Model) -> dict[str, WeightSlot]:
    """All slots of a model by the name their tensor has in a checkpoint."""
    slots: dict[str, WeightSlot] = {}
    for path, module in model.named_modules():
        if isinstance(module, HasWeightSlots):
            for slot in module.weight_slots():
                name = f"{path}.{slot.name}"
                for ours, theirs in model.CHECKPOINT_NAMES.items():
                    name = name.replace(ours, theirs)
                slots[name] = slot
    return slots


def _check_names(
    wanted: Mapping[str, WeightSlot],
    checkpoint: Mapping[str, StoredTensor],
    ignores: Callable[[str], bool],
) -> None:
    missing = [name for name in wanted if name not in checkpoint]
    if missing:
        raise ModelLoadError(f"the checkpoint lacks {_listed(missing)}")
    unexpected = [name for name in checkpoint if name not in wanted and not ignores(name)]
    if unexpected:
        raise ModelLoadError(f"the model has no place for {_listed(unexpected)}")


def _listed(names: list[str], limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return f"{len(names)} tensor(s): {', '.join(names[:limit])}{more}"
