"""Where the structures of stores came from, so that findings name the files to mend."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from nvalchemi_lightning.data.checkup.report import Finding, Place
from nvalchemi_lightning.data.conversion.provenance import origins_in

__all__ = ["with_origins"]


def with_origins(findings: Iterable[Finding], stores: Iterable[str]) -> Iterator[Finding]:
    """Yield the findings, their places in stores with file and frame as far as the stores know them."""
    known = set(stores)
    for finding in findings:
        yield replace(finding, places=tuple(_with_origin(place, known) for place in finding.places))


def _with_origin(place: Place, stores: set[str]) -> Place:
    if place.source not in stores:
        return place
    (origin,) = origins_in(place.source, [place.frame])
    return place if origin is None else replace(place, origin=f"{origin.source}: frame {origin.number}")
