"""Weights of any source to another format: `export`."""
