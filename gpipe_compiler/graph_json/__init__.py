"""Plans for a graph from elsewhere, read from a JSON file; none of it imports torch."""
