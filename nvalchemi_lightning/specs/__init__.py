"""Recipes as JSON: what to build, with which keywords, from which trusted packages."""

from nvalchemi_lightning.specs.base import (
    BaseSpec,
    create_model_spec,
    create_model_spec_from_json,
    without_timestamps,
)
from nvalchemi_lightning.specs.serializers import register_type_serializer
from nvalchemi_lightning.specs.trust import dotted_path, own_path, resolve, trust, trusted_packages

__all__ = [
    "BaseSpec",
    "create_model_spec",
    "create_model_spec_from_json",
    "dotted_path",
    "own_path",
    "register_type_serializer",
    "resolve",
    "trust",
    "trusted_packages",
    "without_timestamps",
]
