"""Save and resume trainings of Lightning's `Trainer`, exactly: a callback in place of `ModelCheckpoint`.

    trainer = Trainer(callbacks=[HoldfastCheckpoint("runs/mine", monitor="val_loss", every_n_train_steps=500)])
    trainer.fit(model)

Works with `lightning` and with `pytorch_lightning`: with the one that the program has imported.
"""

from holdfast.integrations.lightning.callback import HoldfastCheckpoint

__all__ = ["HoldfastCheckpoint"]
