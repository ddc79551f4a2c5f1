"""Batches, terms and loops that the loss tests share."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from nvalchemi_lightning.losses import (
    BaseLossFunction,
    EnergyHuberLoss,
    EnergyMAELoss,
    EnergyMSELoss,
    ForceHuberLoss,
    ForceL2NormLoss,
    ForceMSELoss,
    StressHuberLoss,
    StressMSELoss,
)

NAN = math.nan

ENERGY = (EnergyMSELoss, EnergyMAELoss, EnergyHuberLoss)
FORCE = (ForceMSELoss, ForceHuberLoss, ForceL2NormLoss)
STRESS = (StressMSELoss, StressHuberLoss)
HUBER = (EnergyHuberLoss, ForceHuberLoss, StressHuberLoss)


def every_term() -> list[BaseLossFunction]:
    """Return each term in each of its modes."""
    delta = {"delta": 0.5}
    terms: list[BaseLossFunction] = []
    for cls, per_atom in itertools.product(ENERGY, (True, False)):
        terms.append(cls(per_atom=per_atom, **(delta if cls in HUBER else {})))
    for cls, balanced in itertools.product(FORCE, (True, False)):
        terms.append(cls(normalize_by_atom_count=balanced, **(delta if cls in HUBER else {})))
    return [*terms, StressMSELoss(), StressHuberLoss(**delta)]


EVERY_TERM = every_term()


def label(term: BaseLossFunction) -> str:
    """Return a short name of a term and its mode for test ids."""
    mode = {True: "True", False: "False", None: ""}[
        getattr(term, "per_atom", getattr(term, "normalize_by_atom_count", None))
    ]
    return f"{type(term).__name__}-{mode}".strip("-")


class Structures:
    """Predictions and targets of structures of the given sizes, in float64 unless said otherwise."""

    def __init__(self, sizes: list[int], seed: int = 0, dtype: torch.dtype = torch.float64) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.sizes = sizes
        self.shapes = {"energy": (len(sizes), 1), "forces": (sum(sizes), 3), "stress": (len(sizes), 3, 3)}
        draw = {key: torch.randn(2, *shape, generator=generator, dtype=dtype) for key, shape in self.shapes.items()}
        self.targets = {key: pair[0] for key, pair in draw.items()}
        self.predictions = {f"predicted_{key}": pair[1].requires_grad_() for key, pair in draw.items()}

    @property
    def metadata(self) -> dict[str, Any]:
        counts = torch.tensor(self.sizes)
        return {
            "batch_idx": torch.arange(len(self.sizes)).repeat_interleave(counts),
            "num_graphs": len(self.sizes),
            "num_nodes_per_graph": counts,
        }

    def subset(self, graphs: list[int]) -> Structures:
        """Return the given graphs, in that order, as a batch of their own."""
        atoms = torch.arange(sum(self.sizes)).split(self.sizes)
        rows = {"energy": torch.tensor(graphs), "stress": torch.tensor(graphs)}
        rows["forces"] = torch.cat([atoms[graph] for graph in graphs])
        part = Structures([self.sizes[graph] for graph in graphs])
        part.targets = {key: value[rows[key]] for key, value in self.targets.items()}
        part.predictions = {
            f"predicted_{key}": self.predictions[f"predicted_{key}"].detach()[rows[key]].requires_grad_()
            for key in self.targets
        }
        return part

    def hide(self, key: str, graph: int) -> Structures:
        """Remove a label of one graph: NaN, as a batch carries it."""
        rows: Any = graph
        if key == "forces":
            start = sum(self.sizes[:graph])
            rows = slice(start, start + self.sizes[graph])
        self.targets[key] = self.targets[key].clone()
        self.targets[key][rows] = NAN
        return self

    def call(self, term: BaseLossFunction, **extra: Any) -> Tensor:
        """Call a term on its own pair."""
        pred, target = self.predictions[term.prediction_key], self.targets[term.target_key]
        return term(pred, target, **self.metadata, **extra)


def penalty(term: BaseLossFunction, r: float) -> float:
    """Return the loss of one residual, by the formula."""
    if isinstance(term, HUBER):
        return 0.5 * r * r if abs(r) < term.delta else term.delta * (abs(r) - 0.5 * term.delta)
    return abs(r) if isinstance(term, EnergyMAELoss) else r * r


sizes_strategy = st.lists(st.integers(1, 5), min_size=2, max_size=5)
seeds = st.integers(0, 2**31 - 1)
