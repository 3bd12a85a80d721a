"""PATS: the bank of texts that a method shows during training, and who edits it."""
