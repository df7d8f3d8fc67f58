"""How much memory every device of a plan takes, and when."""
