"""Door 1: durable bytes."""
