"""Files of `torch.save`: read without running anything of their pickles, and written."""
