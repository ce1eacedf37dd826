"""Shards in files: every rank writes its own, any number of ranks reads what it needs of them.

By torch's distributed checkpoints (DCP) in their safetensors form: the usual one keeps its index as a pickle, and no
pickle is ever loaded here.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from posttrain.trainer.ranks import ALONE, Ranks
from posttrain.trainer.sharding import empty_like


def write_shards(folder: Path, tensors: Mapping[str, Tensor], ranks: Ranks) -> None:
    """Every rank has to call it, with the same names; when it returns, all have written."""
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True, enable_consolidation=False)
    with one_will_do():
        save(dict(tensors), storage_writer=writer, process_group=ranks.writers, no_dist=ranks.size == 1)


def read_shards(folder: Path, models: Mapping[str, Tensor] | None = None, ranks: Ranks = ALONE) -> dict[str, Tensor]:
    """The tensors in `folder`, each sharded like its model; `NAME/KEY` belongs to `models[NAME]`. None: whole ones.

    Raises ValueError when one belongs to no model.
    """
    reader = HuggingFaceStorageReader(str(folder))
    tensors: dict[str, Tensor] = {}
    for full_name, stored in reader.read_metadata().state_dict_metadata.items():
        assert isinstance(stored, TensorStorageMetadata)
        name, slash, _ = full_name.rpartition("/")
        if slash and models is not None and name not in models:
            raise ValueError(f"optimizer state {full_name!r} belongs to no trainable parameter of this model")
        dtype: Any = stored.properties.dtype
        model = models[name] if models is not None and stored.size and slash else None
        tensors[full_name] = torch.empty(stored.size, dtype=dtype) if model is None else empty_like(model, dtype)
    with one_will_do():
        load(tensors, storage_reader=reader, process_group=ranks.writers, no_dist=ranks.size == 1)
    return tensors


@contextmanager
def one_will_do() -> Iterator[None]:
    """DCP warns of a process that is alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield
