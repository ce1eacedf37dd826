"""Names of tensors on both sides of a transfer: a policy's, and those of an engine that has fused or wrapped layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from posttrain.weights.adapters import FACTORS

WRAPPED = ".base_layer."  # in the names of layers that an engine has prepared for adapters


def unmatched(
    names: Sequence[str], own: Sequence[str], packed: Mapping[str, Sequence[str]]
) -> tuple[list[str], list[str]]:
    """(names that the engine has no tensor for, tensors that it needs and that are not among the names).

    All in Hugging Face layout. own: the engine's names. packed: fused module -> the modules that it is made of.
    """
    plain = {name.replace(WRAPPED, "."): WRAPPED in name for name in own}
    needed = {part: None for name in plain for part in unfused(name, packed)}
    layers = {part.rpartition(".")[0] for name, wrapped in plain.items() if wrapped for part in unfused(name, packed)}
    places = needed.keys() | {f"{layer}.{factor}.weight" for layer in layers for factor in FACTORS}
    given = set(names)
    return [name for name in names if name not in places], [name for name in needed if name not in given]


def unfused(name: str, packed: Mapping[str, Sequence[str]]) -> list[str]:
    """The names under which a checkpoint holds the engine's tensor."""
    words = name.split(".")
    for place, word in enumerate(words):
        if word in packed:
            return [".".join([*words[:place], part, *words[place + 1 :]]) for part in packed[word]]
    return [name]
