"""Runs that are more than one process: who starts them, how they speak, who does what."""
