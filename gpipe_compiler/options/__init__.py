"""What a user asks for: the values that options of the commands and of the API take."""
