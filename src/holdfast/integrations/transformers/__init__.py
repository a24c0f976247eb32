"""The `Trainer` of transformers, with its checkpoints in a Holdfast run: `HoldfastTrainer`, a mix-in.

It overrides private methods of the Trainer: versions of transformers other than the tested ones are refused when this
is imported.
"""

from holdfast.integrations.transformers.trainer import HoldfastTrainer

__all__ = ["HoldfastTrainer"]
