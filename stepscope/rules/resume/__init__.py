"""Resuming: RES."""
