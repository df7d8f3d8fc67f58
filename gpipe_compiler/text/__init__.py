"""Names, paths and figures as text."""
