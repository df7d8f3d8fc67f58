"""The engine: what a `Pipeline` is made of, from its stages to the messages between them."""
