"""What a training checkpoint of another tool consists of, as the components of a Holdfast checkpoint."""
