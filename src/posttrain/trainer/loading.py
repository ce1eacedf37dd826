"""Finds, checks and loads a decoder-only language model in Hugging Face layout. No pickle is ever read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator
from safetensors import SafetensorError
from torch import nn
from transformers.models.auto.configuration_auto import AutoConfig
from transformers.models.auto.modeling_auto import AutoModel, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from posttrain.location import at_home
from posttrain.trainer import attention

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ASSETS = Path(__file__).resolve().parent.parent / "assets"
ALL_LINEAR = "all-linear"
ADAPTER_CONFIG = "adapter_config.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


class LoraConfig(BaseModel):
    """Adapters in the place of all weights (Hu et al. 2021, LoRA): W + alpha / rank * B A, where A and B train."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    rank: int = Field(default=16, ge=1, description="of A and B")
    alpha: float = Field(default=32.0, gt=0, description="the update B A counts alpha / rank times")
    rslora: bool = Field(default=False, description="alpha / sqrt(rank) in its place (Kalajdzievski 2023)")
    target_modules: Literal["all-linear"] | tuple[str, ...] = Field(
        default="all-linear",
        description="last words of the names of the layers that get them, such as q_proj; all-linear: all of the "
        "decoder's, its head not",
    )
    exclude_modules: tuple[str, ...] = Field(default=(), description="of these, layers that get none")
    dropout: float = Field(default=0.0, description="0 only: the sampler has to compute what the trainer computes")
    path: Annotated[str, AfterValidator(at_home)] | None = Field(
        default=None,
        description="a directory in peft's layout (adapter_config.json, adapter_model.safetensors) to start from; what "
        "is set beside it has to agree with it",
    )

    @field_validator("target_modules", mode="before")
    @classmethod
    def _one_is_a_list(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) and value != ALL_LINEAR else value

    @field_validator("dropout")
    @classmethod
    def _none(cls, value: float) -> float:
        if value:
            raise ValueError(
                f"{value:g} would make the log-probs of trainer and sampler differ, so that ratios of a policy to "
                "itself are not 1; leave it out"
            )
        return value


class ModelConfig(BaseModel):
    """Which model, and how it is held."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: Annotated[str, AfterValidator(at_home)] = Field(
        description="a directory in Hugging Face layout (config.json, *.safetensors), the name of a model that is part "
        "of this package, or a hub id"
    )
    thinking: Literal["keep", "strip_and_fork"] = Field(
        default="keep", description="what becomes of earlier thinking where the chat template would drop it"
    )
    dtype: Literal["float32", "bfloat16", "auto"] = Field(
        default="auto", description="auto: bfloat16 on CUDA, float32 on CPU"
    )
    device: Literal["auto", "cpu", "cuda"] = "auto"
    compile: bool | Literal["auto"] = Field(
        default="auto",
        description="torch.compile of every layer, for training and sampling; auto: on CUDA, but for adapters (it "
        "takes minutes). The first step then waits for the compiler",
    )
    gradient_checkpointing: bool = Field(default=False, description="trade one more forward for activation memory")
    lora: LoraConfig | None = Field(
        default=None, description="train adapters, and leave the weights at `path` as they are"
    )

    def compiles_on(self, device: str) -> bool:
        """Whether layers are compiled on a device of that type."""
        return device == "cuda" and self.lora is None if self.compile == "auto" else self.compile

    @property
    def named(self) -> str:
        """What it is called by: where its weights are, or the adapter that it starts from."""
        return self.path if self.lora is None or self.lora.path is None else self.lora.path


class ModelError(ValueError):
    """The model at hand cannot be loaded or cannot be trained here; the message says why and what to do."""


def pick_device(device: str) -> torch.device:
    """auto: CUDA where there is one."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise ModelError("model.device is cuda but torch sees no CUDA device; use device: auto or cpu")
    return torch.device(device)


def pick_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """auto: bfloat16 on CUDA; float32 on CPU, where bfloat16 products are slow."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if dtype not in DTYPES:
        raise ModelError(f"unknown dtype {dtype!r}; choose one of {', '.join(DTYPES)}, auto")
    return DTYPES[dtype]


def load_module(path: str | Path, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """The causal language model at `path`, its attention ours, dropout off, on `device`.

    Raises ModelError for a missing or incomplete directory, for pickled weights, and for tensors that the file lacks
    or that have another shape (a silently random layer would train).
    """
    return _load(AutoModelForCausalLM, path, device, dtype)


def load_decoder(path: str | Path, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """The same model without its head, for a critic."""
    return _load(AutoModel, path, device, dtype)


def _load(auto_class: Any, path: str | Path, device: torch.device, dtype: torch.dtype) -> nn.Module:
    path = model_path(path)
    check_directory(path)
    options = {"dtype": dtype, "attn_implementation": attention.NAME, "output_loading_info": True}
    try:
        with no_progress_bars():
            module, info = auto_class.from_pretrained(
                str(path), use_safetensors=True, trust_remote_code=False, **options
            )
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(
            f"no model at {str(path)!r}: it is no directory, and the hub did not give it either ({error}); "
            "set model.path to a directory with config.json and *.safetensors"
            if not Path(path).exists()
            else f"the model at {path} cannot be read: {error}"
        ) from error
    missing, mismatched = sorted(info["missing_keys"]), sorted(str(key) for key in info["mismatched_keys"])
    if missing or mismatched:
        raise ModelError(f"{path}: the weights lack {missing[:5]} and differ in shape at {mismatched[:5]}")
    switch_off_dropout(module)
    return own_memory(module.to(device)).eval()


def own_memory(module: nn.Module) -> nn.Module:
    """Copies CPU weights out of the memory-mapped file that they were loaded from.

    Kernels then see the same alignment in every process, and the file may change or be deleted.
    """
    if next(module.parameters()).device.type == "cpu":
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.data = tensor.data.clone()
    return module


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """A context without transformers' progress bars for weight files, which would spoil a display that is running."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def write_module(module: Any, directory: Path, tokenizer: Any = None, state: dict[str, Any] | None = None) -> None:
    """Hugging Face layout. state: these weights instead of the module's own."""
    directory.mkdir(parents=True, exist_ok=True)
    with no_progress_bars():
        module.save_pretrained(directory, state_dict=state)
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)


def build_module(config: Any, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """A randomly initialised model from a transformers config; seed torch first."""
    module = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention.NAME)
    switch_off_dropout(module)
    return module.to(device).eval()


def model_path(path: str | Path) -> str:
    """The directory of a model that is part of this package, when `path` is its name and no directory; else `path`."""
    packaged = ASSETS / str(path)
    return str(packaged) if not Path(path).exists() and (packaged / "config.json").is_file() else str(path)


def check_directory(path: str | Path) -> None:
    """Names what is wrong with a local model directory; a path that looks like a hub id and is absent passes."""
    directory = Path(path)
    if not directory.exists():
        if len(directory.parts) == 2 and not directory.is_absolute() and directory.parts[0] not in {".", ".."}:
            return  # org/name: transformers asks its cache and the hub
        raise ModelError(f"no model directory {path}; model.path must hold config.json and *.safetensors")
    if not directory.is_dir():
        raise ModelError(f"{path} is a file; model.path must be the directory that holds config.json and *.safetensors")
    if not (directory / "config.json").is_file():
        raise ModelError(
            f"{path} is an adapter, without the model that it belongs to; set model.path to that model and "
            "model.lora.path to the adapter"
            if (directory / ADAPTER_CONFIG).is_file()
            else f"{path} has no config.json; is it a checkpoint's parent?"
        )
    try:
        json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{directory / 'config.json'} is not JSON: {error}") from error
    if not any(directory.glob("*.safetensors")):
        pickles = sorted(file.name for file in directory.iterdir() if file.suffix in PICKLES)
        raise ModelError(
            f"{path} holds pickled weights ({', '.join(pickles)}), which can run code when loaded and are refused; "
            "convert them to safetensors first"
            if pickles
            else f"{path} has a config.json but no *.safetensors weights"
        )


def load_config(path: str | Path) -> Any:
    """The transformers config at `path`, after the same checks. Raises ModelError for one that it does not know."""
    check_directory(path)
    try:
        return AutoConfig.from_pretrained(str(path), trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"transformers {version('transformers')} does not know the model at {path}: {first}"
        ) from error


def switch_off_dropout(module: nn.Module) -> None:
    """Sampler and trainer must be one function: with dropout the ratio of a token to itself is not 1."""
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        if isinstance(getattr(part, "attention_dropout", None), float):
            part.attention_dropout = 0.0  # type: ignore[assignment]
