"""What `run.py` does with a `Pipeline`: train, infer, check, time, export."""
