"""Writes the package: a plan and its graph become source text, weights and scripts."""
