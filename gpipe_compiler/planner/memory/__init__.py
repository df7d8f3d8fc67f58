"""The memory of every device of a plan over a step, simulated from traces of its stages."""
