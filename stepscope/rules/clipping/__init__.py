"""Clipping: CLP."""
