"""Weights of any format into a model: `load_weights` and `build_model`."""
