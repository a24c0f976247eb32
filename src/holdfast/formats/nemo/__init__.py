"""NeMo's archives, and tar archives of strangers in general."""
