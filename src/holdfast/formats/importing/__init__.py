"""Training checkpoints of other tools, taken apart into components and committed to a run: `import_checkpoint`."""
