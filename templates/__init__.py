"""The templates of the emitted files."""
