"""Checks for zeros that stand for labels nobody computed."""

from __future__ import annotations

from nvalchemi_lightning.data.checkup.fingerprint import polarity
from nvalchemi_lightning.data.checkup.subject import Subject

__all__ = ["zero_forces", "zero_stress"]

_ASYMMETRIC = 0.01


def zero_forces(subject: Subject) -> str | None:
    """Find forces of exactly zero on atoms whose surroundings are not symmetric."""
    if subject.known["forces"].any() or len(subject.numbers) == 1 or polarity(subject) < _ASYMMETRIC:
        return None
    return f"all {len(subject.numbers)} forces are exactly 0, though not by symmetry"


def zero_stress(subject: Subject) -> str | None:
    """Find stress of exactly zero in matter."""
    if subject.known["stress"].any() or not len(subject.edges):
        return None
    return "the stress is exactly 0"
