"""The process that writes: it takes staged files over from the trainer, makes them durable and commits. No torch."""
