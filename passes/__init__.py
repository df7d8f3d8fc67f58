"""Passes: plain functions that annotate or transform a Graph, one file each."""
