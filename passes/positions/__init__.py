"""Follows tensors that are made of positions and constants alone, such as attention masks.

What is found holds at any size and in any precision: positions are followed as integers only, in
types that hold any size.
"""
