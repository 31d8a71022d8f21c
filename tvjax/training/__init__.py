"""Fine-tuning: the papers' recipe, a data order that can be entered at any step, the losses, and one loop, `fit`."""
from tvjax.training.feed import batches, own_rows, recipe_batches, size
from tvjax.training.loop import Fitted, fit
from tvjax.training.losses import cross_entropy, normalise
from tvjax.training.recipe import EPOCHS, Recipe, epochs_to_steps, optimizer, schedule
from tvjax.training.remat import held_bytes, rematerialised
from tvjax.training.sparsity import fit_sparse, masked_adamw, sparse, touched, training_bytes

__all__ = [
    "EPOCHS", "Fitted", "Recipe", "batches", "cross_entropy", "epochs_to_steps", "fit", "fit_sparse", "held_bytes",
    "masked_adamw", "normalise", "optimizer", "own_rows", "recipe_batches", "rematerialised", "schedule", "size",
    "sparse", "touched", "training_bytes",
]
