"""Makes the Plan of a graph: candidates, what they take, and the search among settings."""
