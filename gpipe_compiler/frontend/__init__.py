"""Turns a model into a Graph."""
