"""Modes, numbers and averages: NUM."""
