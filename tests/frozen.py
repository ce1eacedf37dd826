"""Imported last by a server that forks: its children never look for garbage in what it has loaded, nor copy that."""

import gc

gc.freeze()
