"""Papermill in sequence: parameters in, one folder a run out. Nothing here imports torch; the kernels do."""
