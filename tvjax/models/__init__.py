"""Networks as Flax modules whose parameter tree is the Hugging Face tree; one family a module."""
