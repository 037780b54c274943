"""Importing this module registers every command."""

from spatially.cli import anatomy, demo, listing, look, probe, report

__all__ = ["anatomy", "demo", "listing", "look", "probe", "report"]
