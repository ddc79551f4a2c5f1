"""Zarr stores: reading, writing, checking and mending them."""
