"""The way of the data, one stage per module: capture, plan, write, commit; and back: resolve, verify, read, restore."""
