"""Well-known networks as operator graphs, a module for each family; `graphs.py` lists them."""
