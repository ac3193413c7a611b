"""A measured training run, on one rank or many."""
