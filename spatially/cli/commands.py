"""Importing this module registers every command."""

from spatially.cli import anatomy, demo, listing, look, probe, recipes, report, sweep, train, train_demo

__all__ = ["anatomy", "demo", "listing", "look", "probe", "recipes", "report", "sweep", "train", "train_demo"]
