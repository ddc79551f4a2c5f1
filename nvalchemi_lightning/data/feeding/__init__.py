"""Data sets, orders and loaders."""
