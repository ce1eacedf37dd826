"""LoRA adapters in a model's layers, by peft, which is imported when a config asks for them.

What trains, what a checkpoint holds and what travels to samplers are then the factors A and B only. A is drawn by a
seed and B is 0: before the first step the model computes what it computes without adapters, to the bit.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from posttrain.location import did_you_mean
from posttrain.trainer.loading import ADAPTER_CONFIG, ALL_LINEAR, LoraConfig, ModelError, switch_off_dropout

ADAPTER = "adapter"  # the folder beside, or instead of, a model's files
WEIGHTS = "adapter_model.safetensors"
SHOWN = 3  # tensors that an error names


def with_adapters(module: nn.Module, config: LoraConfig, *, seed: int) -> nn.Module:
    """peft's model around `module`, whose own parameters no longer train. Adapters are in the dtype of their layers.

    seed: of A; the global random state is left as it was.
    Raises ModelError without peft, for names that no linear layer has, and for an adapter at `config.path` that is
    broken, of another model, or not as the rest of the config says.
    """
    peft = _peft()
    if config.path is None:
        settings = peft.LoraConfig(
            r=config.rank,
            lora_alpha=config.alpha,
            use_rslora=config.rslora,
            target_modules=target_words(module, config),
            exclude_modules=list(config.exclude_modules) or None,
            task_type="CAUSAL_LM",
        )
        return _adapted(peft, module, settings, seed)
    folder = Path(config.path)
    adapted = _adapted(peft, module, _settings_in(peft, folder, config), seed)
    _load(peft, adapted, folder)
    return adapted


def target_words(module: nn.Module, config: LoraConfig) -> list[str]:
    """Names of layers that get adapters, as peft takes them. Raises ModelError for one that fits no linear layer."""
    layers = _layers_below_head(module)
    words = sorted({layer.rpartition(".")[2] for layer in layers})
    for key in ("target_modules", "exclude_modules"):
        named = getattr(config, key)
        for name in () if named == ALL_LINEAR else named:
            if not any(_is_called(layer, [name]) for layer in layers):
                near = did_you_mean(name, words)
                raise ModelError(
                    f"model.lora.{key}: {type(module).__name__} has no linear layer {name!r} below its head.{near} "
                    f"It has {', '.join(words)}"
                )
    wanted = words if config.target_modules == ALL_LINEAR else list(config.target_modules)
    if not any(_is_called(layer, wanted) and not _is_called(layer, config.exclude_modules) for layer in layers):
        raise ModelError("model.lora.exclude_modules leaves no layer that gets adapters; name fewer")
    return wanted


def factor_sizes(module: nn.Module, config: LoraConfig) -> list[tuple[int, int, int]]:
    """(rank, width of the input, width of the output) of every layer that gets an adapter. No weight is read."""
    if config.path is None:
        wanted = target_words(module, config)
        layers = _layers_below_head(module).items()
        chosen = [part for n, part in layers if _is_called(n, wanted) and not _is_called(n, config.exclude_modules)]
        return [(config.rank, part.in_features, part.out_features) for part in chosen]
    _check_files(Path(config.path))
    with safe_open(Path(config.path) / WEIGHTS, "pt") as file:
        shapes: dict[str, list[int]] = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    pairs = [(name, name.replace(".lora_A.", ".lora_B.")) for name in shapes if ".lora_A." in name]
    return [(shapes[a][0], shapes[a][1], shapes[b][0]) for a, b in pairs if b in shapes]


def _layers_below_head(module: nn.Module) -> dict[str, nn.Linear]:
    head = module.get_output_embeddings()  # type: ignore[operator]
    return {n: part for n, part in module.named_modules() if isinstance(part, nn.Linear) and part is not head}


def _is_called(layer: str, names: Iterable[str]) -> bool:
    return any(layer == name or layer.endswith(f".{name}") for name in names)


def without_adapters(module: nn.Module) -> nn.Module:
    """The base below the adapters as a model of its own, frozen, on the very same weights: it costs no memory.

    Forwards of the two may run side by side.
    """
    shared: dict[int, Any] = {id(t): t for t in (*module.parameters(), *module.buffers())}
    base: nn.Module = copy.deepcopy(module, shared).unload()  # type: ignore[operator]
    for part in base.modules():
        part._compiled_call_impl = None  # it would compute the layer that it was made for
    return base


def trained_state(module: nn.Module) -> dict[str, Tensor]:
    """The trained parameters, by name."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def save_adapter(module: nn.Module, folder: Path, state: Mapping[str, Tensor] | None = None) -> None:
    """In peft's layout, the same bytes for the same weights. state: what trains, by name (`trained_state`), instead of
    what it is now."""
    settings = module.peft_config[module.active_adapter].to_dict() | {"inference_mode": True}  # type: ignore[index, union-attr]
    plain = {key: sorted(value) if isinstance(value, set) else value for key, value in settings.items()}
    tensors = _peft().get_peft_model_state_dict(module, state_dict=state, save_embedding_layers=False)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ADAPTER_CONFIG).write_text(json.dumps(plain, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    on_host = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(on_host, folder / WEIGHTS, metadata={"format": "pt"})


def _peft() -> Any:
    try:
        import peft  # type: ignore[import-not-found]
    except ImportError as error:
        raise ModelError(
            f"model.lora needs peft, which cannot be imported ({error}); pip install 'posttrain[lora]', or leave "
            "model.lora out"
        ) from error
    return peft


def _adapted(peft: Any, module: nn.Module, settings: Any, seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        adapted: nn.Module = peft.get_peft_model(module, settings, autocast_adapter_dtype=False)
    switch_off_dropout(adapted)
    return adapted.eval()


def _check_files(folder: Path) -> None:
    for name in (ADAPTER_CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            fix = "give a directory that peft has written, with safetensors"
            raise ModelError(f"model.lora.path = {folder} has no {name}; {fix}")


def _settings_in(peft: Any, folder: Path, config: LoraConfig) -> Any:
    """Those of the adapter in `folder`. Raises ModelError where the config says something else."""
    _check_files(folder)
    said = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    if said.get("peft_type") != "LORA":
        raise ModelError(f"model.lora.path = {folder} is of the kind {said.get('peft_type')}; only LORA trains here")
    own = {"rank": said["r"], "alpha": said["lora_alpha"], "rslora": said.get("use_rslora", False)}
    for key, value in own.items():
        wanted = getattr(config, key)
        if key in config.model_fields_set and wanted != value:
            raise ModelError(f"model.lora.{key} is {wanted}, and that of the adapter at {folder} {value}; leave it out")
    settings = peft.LoraConfig.from_pretrained(str(folder))
    settings.inference_mode, settings.lora_dropout = False, 0.0
    return settings


def _load(peft: Any, adapted: nn.Module, folder: Path) -> None:
    """Raises ModelError naming tensors that one side lacks, or that have another shape."""
    tensors = load_file(folder / WEIGHTS)
    wanted = peft.get_peft_model_state_dict(adapted, save_embedding_layers=False)
    problems = [f"it lacks {name}" for name in wanted if name not in tensors]
    problems += [f"the model has no {name}" for name in tensors if name not in wanted]
    problems += [
        f"{name} is {list(tensors[name].shape)} in it and {list(tensor.shape)} in the model"
        for name, tensor in wanted.items()
        if name in tensors and tensors[name].shape != tensor.shape
    ]
    if problems:
        more = f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise ModelError(f"the adapter at {folder} is not of this model: {'; '.join(problems[:SHOWN])}{more}")
    peft.set_peft_model_state_dict(adapted, tensors)
