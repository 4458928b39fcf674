"""Fixtures of the shelf: measurements cut short."""

from shortcuts import quick_run

__all__ = ["quick_run"]
