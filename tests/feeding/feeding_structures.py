"""Structures for the tests of reading, ordering and loading."""

from __future__ import annotations

import torch

from nvalchemi_lightning.data import AtomicData


def make_structures(
    count: int, *, seed: int = 0, edges: bool = False, labels: bool = True, dtype: torch.dtype = torch.float32
) -> list[AtomicData]:
    """Return structures of 1 to 5 atoms whose energy is their number, with a ring of edges if asked for."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for number in range(count):
        atoms = 1 + int(torch.randint(5, (1,), generator=generator))
        fields = {}
        if labels:
            fields = {
                "energy": torch.full((1, 1), float(number), dtype=dtype),
                "forces": torch.randn(atoms, 3, generator=generator, dtype=dtype),
            }
        if edges:
            ring = torch.arange(atoms)
            fields["neighbor_list"] = torch.stack((ring, (ring + 1) % atoms), 1)[: atoms if number % 3 else 0]
        made.append(
            AtomicData(
                positions=torch.randn(atoms, 3, generator=generator, dtype=dtype),
                atomic_numbers=torch.randint(1, 30, (atoms,), generator=generator, dtype=torch.int32),
                **fields,
            )
        )
    return made
