"""Fine-tuning: the papers' recipe, a data order that can be entered at any step, the losses, and one loop, `fit`."""
from tvjax.training.feed import batches, size
from tvjax.training.loop import Fitted, fit
from tvjax.training.losses import cross_entropy, normalise
from tvjax.training.recipe import EPOCHS, Recipe, epochs_to_steps, optimizer, schedule, sparse

__all__ = [
    "EPOCHS", "Fitted", "Recipe", "batches", "cross_entropy", "epochs_to_steps", "fit", "normalise", "optimizer",
    "schedule", "size", "sparse",
]
