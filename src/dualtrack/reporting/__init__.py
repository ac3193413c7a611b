"""Plots, pages and verification, from records alone. Nothing here imports torch."""
