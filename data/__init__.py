"""Texts, and where they come from."""
