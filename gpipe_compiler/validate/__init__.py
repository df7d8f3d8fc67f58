"""Holds an emitted package against the model that it was made of."""
