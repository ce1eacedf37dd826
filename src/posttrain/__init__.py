"""posttrain: post-training of language-model agents.

Import what you need from the rooms (`posttrain.task`, `posttrain.envs`, ...); the package itself loads nothing heavy.
"""

__version__ = "0.1.0"
