"""Schedules: generators of actions, lowering to transfers, and the proof that nobody hangs."""
