"""The time and the memory of a step, predicted from a schedule."""
