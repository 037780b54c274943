"""Importing this module registers every command."""

from spatially.cli import demo, listing, look, probe, report

__all__ = ["demo", "listing", "look", "probe", "report"]
