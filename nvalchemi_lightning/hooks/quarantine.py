"""Which structures were in a batch that must not be trained on, and the file that lists them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nvalchemi_lightning.data.feeding.sampler import rank_and_world

__all__ = ["BatchNote", "Suspect", "append_record", "listed", "suspects"]

_SHOWN = 5


@dataclass(frozen=True)
class Suspect:
    """A structure of a batch that was refused.

    Attributes
    ----------
    source : str or None
        The store that it comes from, None if the batch does not say.
    number : int or None
        Its number there.
    batch, position : int
        The batches that were completed before its own, and its place in it.
    loss : float or None
        Its part of the loss, None if the loss does not tell.
    """

    source: str | None
    number: int | None
    batch: int
    position: int
    loss: float | None

    def __str__(self) -> str:
        told = "" if self.loss is None else f" (loss {self.loss:.3g})"
        if self.source is not None:
            return f"{self.source} number {self.number}{told}"
        return f"structure {self.position} of the batch after {self.batch}{told}"


@dataclass(frozen=True)
class BatchNote:
    """What is kept of a batch until the step that uses it: no atoms, and nothing that waits for the device.

    Attributes
    ----------
    loss : Tensor
        Its loss, a scalar.
    samples : tuple of Tensor
        The loss of each structure, one tensor of shape (B,) per term that tells.
    origins : sequence
        Where each structure comes from; may be empty.
    size : int
        The number B of structures.
    number : int
        The batches that were completed before.
    """

    loss: Tensor
    samples: tuple[Tensor, ...]
    origins: Sequence[Any]
    size: int
    number: int

    @classmethod
    def of(cls, ctx: Any) -> BatchNote:
        """Return the note of a batch whose loss is known."""
        size, origins = ctx.batch.num_graphs, getattr(ctx.batch, "origins", ())
        told = (ctx.losses or {}).get("per_component_sample", {}).values()
        samples = tuple(sample for sample in told if len(sample) == size)
        return cls(ctx.loss.detach(), samples, origins, size, ctx.batch_count)

    def suspects(self) -> list[Suspect]:
        """Return every structure of the batch."""
        losses: list[float | None] = [None] * self.size
        if self.samples:
            losses = torch.stack([sample.double() for sample in self.samples]).sum(0).tolist()
        origins = self.origins or [(None, None)] * self.size
        return [
            Suspect(source, number, self.number, position, loss)
            for position, ((source, number), loss) in enumerate(zip(origins, losses, strict=True))
        ]


def suspects(notes: Iterable[BatchNote]) -> list[Suspect]:
    """Return the structures of batches, of all ranks; every rank must call this at the same time.

    Parameters
    ----------
    notes : iterable of BatchNote
        The batches of this rank.

    Returns
    -------
    list of Suspect
        Only those whose loss is not finite if there are any, else all of them, the largest loss first.
    """
    found = [suspect for note in notes for suspect in note.suspects()]
    world = rank_and_world()[1]
    if world > 1:
        of_ranks: list[Any] = [None] * world
        torch.distributed.all_gather_object(of_ranks, found)
        found = [suspect for of_rank in of_ranks for suspect in of_rank]
    broken = [suspect for suspect in found if suspect.loss is not None and not math.isfinite(suspect.loss)]
    return broken or sorted(found, key=lambda suspect: -(suspect.loss or 0.0))


def listed(found: Sequence[Suspect]) -> str:
    """Return the first few structures as text.

    Parameters
    ----------
    found : sequence of Suspect
        What `suspects` returned.
    """
    names = ", ".join(map(str, found[:_SHOWN]))
    return f"{names} and {len(found) - _SHOWN} more" if len(found) > _SHOWN else names


def append_record(path: Path, record: Mapping[str, Any], found: Sequence[Suspect]) -> None:
    """Append one line of JSON to a file, from rank 0 alone; numbers that are not finite become text.

    Parameters
    ----------
    path : Path
        The file; made if absent, with its folder.
    record : mapping
        What happened.
    found : sequence of Suspect
        The structures, under ``"structures"``.
    """
    if rank_and_world()[0] != 0:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps(_strict({**record, "structures": [asdict(suspect) for suspect in found]}), allow_nan=False)
    with path.open("a", encoding="utf-8") as file:
        file.write(f"{line}\n")


def _strict(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_strict(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
