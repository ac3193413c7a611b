"""Bundled training jobs with real data."""
