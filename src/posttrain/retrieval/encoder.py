"""Text -> vectors, by any encoder that transformers loads: BERT-like, T5-like or decoder-only.

What the model's makers wrote down for sentence-transformers (pooling, normalisation, further linear layers, longest
input, prompts) is read from their files; that package itself is not needed. A setting of `EncoderConfig` wins over it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.models.auto.configuration_auto import AutoConfig
from transformers.models.auto.modeling_auto import AutoModel
from transformers.models.auto.tokenization_auto import AutoTokenizer
from transformers.utils.hub import cached_file

from posttrain.location import at_home, is_location, locate

Pooling = Literal["mean", "cls", "last", "max"]
TextKind = Literal["query", "passage"]
_HASHED = re.compile(r".*\.safetensors$|pytorch_model.*\.bin$|config\.json$|tokenizer\.json$|vocab\.txt$|.*\.model$")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_CHARACTERS_PER_TOKEN = 64  # at most, on average: a longer text is cut before it is tokenised
_BGE_ENGLISH = "Represent this sentence for searching relevant passages: "
_BGE_CHINESE = "为这个句子生成表示以用于检索相关文章："


class EncoderError(ValueError):
    """An encoder cannot be loaded, or is not the one that is needed; says what to do."""


ModelPlace = Annotated[str, AfterValidator(at_home)]


class EncoderConfig(BaseModel):
    """An encoder of passages and queries. What is left out is read from the model's own files."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model: ModelPlace | None = None  # a directory, a name on the hub, or "pkg.mod:function" that returns a directory
    # may be left out over an index, which names its own
    pooling: Pooling | None = None  # of the last layer's states: mean, cls (first), last, max
    normalize: bool | None = None  # to length 1, so that the inner product is the cosine
    query_prefix: str | None = None  # left out: what E5, BGE and stored prompts want, else nothing
    passage_prefix: str | None = None
    max_tokens: int | None = Field(default=None, ge=4)  # of one text, prefix included; what is cut is counted
    tokens_per_batch: int = Field(default=8192, ge=1)  # padded; longer batches use more memory
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: str = "auto"  # auto: the first GPU where there is one


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderSettings:
    """Everything that decides what vector a text gets; stored with an index, and compared when it is opened."""

    name: str
    sha256: str  # over weights, config and tokenizer
    pooling: Pooling
    normalize: bool
    query_prefix: str
    passage_prefix: str
    max_tokens: int


class Encoder:
    """Loaded for inference. `encode` may be called from any one thread at a time.

    settings: what the vectors depend on. dimensions: of a vector. truncated: texts of which tokens were cut so far.
    Raises EncoderError when there is no such model, or when its files ask for something unknown here.
    """

    def __init__(self, config: EncoderConfig) -> None:
        if config.model is None:
            raise EncoderError("encoder.model is missing: name a directory, or a model of the hub")
        self.config = config
        folder = model_folder(config.model)
        self.device = torch.device(pick_device(config.device))
        self.tokenizer = _load(AutoTokenizer, folder)
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.tokenizer.padding_side = "right"
        loaded, report = _load(AutoModel, folder, dtype=DTYPES[config.dtype], output_loading_info=True)
        module = loaded.get_encoder() if hasattr(loaded, "encoder") and hasattr(loaded, "decoder") else loaded
        _check_weights(module, report["missing_keys"], folder)
        self._module: nn.Module = module.to(self.device).eval().requires_grad_(False)
        shipped = _Shipped.read(folder)
        self._heads = [head.to(self.device) for head in shipped.linear_layers]
        self.settings = _settings(config, config.model, folder, shipped, _longest(loaded.config, self.tokenizer))
        self.truncated = 0
        self.dimensions = self._encode_batch(["a"]).shape[1]

    def encode(self, texts: Sequence[str], kind: TextKind) -> NDArray[np.float32]:
        """[N, dimensions], one row per text, in order. Batches hold texts of about one length."""
        prefix = self.settings.query_prefix if kind == "query" else self.settings.passage_prefix
        made = np.empty((len(texts), self.dimensions), dtype=np.float32)
        prefixed = [self._cut(prefix + text) for text in texts]
        for rows in self._batches(prefixed):
            made[rows] = self._encode_batch([prefixed[row] for row in rows])
        return made

    def _cut(self, text: str) -> str:
        return text[: self.settings.max_tokens * _CHARACTERS_PER_TOKEN]

    def _batches(self, texts: Sequence[str]) -> Iterator[list[int]]:
        """Rows by length in characters, longest first (a lack of memory then shows at once), cut by padded tokens."""
        order = sorted(range(len(texts)), key=lambda row: -len(texts[row]))
        batch: list[int] = []
        width = 0
        for row in order:
            # 2 characters to a token is less than any text but a hostile one has: batches come out small, not large
            width = max(width, min(self.settings.max_tokens, len(texts[row]) // 2 + 8))
            if batch and width * (len(batch) + 1) > self.config.tokens_per_batch:
                yield batch
                batch, width = [], min(self.settings.max_tokens, len(texts[row]) // 2 + 8)
            batch.append(row)
        if batch:
            yield batch

    def _encode_batch(self, texts: list[str]) -> NDArray[np.float32]:
        longest = self.settings.max_tokens
        limit = longest + 1  # one more than fits, so that what is cut shows
        tokens = self.tokenizer(texts, truncation=True, max_length=limit, return_length=True)
        lengths = [len(ids) for ids in tokens["input_ids"]]
        self.truncated += sum(length > longest for length in lengths)
        if max(lengths) > longest:
            tokens = self.tokenizer(texts, truncation=True, max_length=longest)
        padded = self.tokenizer.pad({"input_ids": tokens["input_ids"]}, return_tensors="pt").to(self.device)
        with torch.inference_mode():
            hidden = self._module(input_ids=padded["input_ids"], attention_mask=padded["attention_mask"])
            pooled = pool(hidden.last_hidden_state, padded["attention_mask"], self.settings.pooling)
            for head in self._heads:
                pooled = head(pooled)
            if self.settings.normalize:
                pooled = nn.functional.normalize(pooled, dim=-1)
        return pooled.float().cpu().numpy()


def pool(states: Tensor, mask: Tensor, how: Pooling) -> Tensor:
    """[B, L, D] states of right-padded texts, [B, L] 1 where a token is -> [B, D] float32."""
    states = states.float()
    if how == "cls":
        return states[:, 0]
    if how == "last":
        return states[torch.arange(len(states), device=states.device), mask.sum(1) - 1]
    kept = mask.bool().unsqueeze(-1)
    if how == "max":
        return states.masked_fill(~kept, -torch.inf).amax(1)
    return states.masked_fill(~kept, 0.0).sum(1) / kept.sum(1).clamp(min=1)


def family_prefixes(name: str) -> tuple[str, str]:
    """(query, passage) prefixes that encoders known by name were trained with; ("", "") for others.

    E5 (Wang et al. 2022, arXiv:2212.03533) and BGE (Xiao et al. 2023, arXiv:2309.07597). The instruction-tuned E5
    models and BGE-M3 are others: the first need a task written by their user, the second wants nothing.
    """
    last = name.lower().replace("_", "-").rstrip("/").rpartition("/")[2]
    if re.search(r"(^|-)e5-(small|base|large)", last) and "instruct" not in last:
        return "query: ", "passage: "
    if re.search(r"(^|-)bge-(small|base|large)", last):
        return (_BGE_CHINESE if "-zh" in last else _BGE_ENGLISH), ""
    return "", ""


def model_folder(model: str) -> Path:
    """Where the files of a model lie; fetched from the hub when the name is neither a folder nor a location."""
    if is_location(model):
        return Path(locate(model)())
    folder = Path(model)
    if folder.is_dir():
        return folder
    try:
        found = cached_file(model, "config.json")
        cached_file(model, "modules.json", _raise_exceptions_for_missing_entries=False)
    except OSError as error:
        raise EncoderError(
            f"there is no encoder {model!r}: no such folder, and the hub does not give it ({str(error)[:200]}); "
            "name a directory with config.json and the weights, or a model of the hub"
        ) from error
    assert found is not None
    return Path(found).parent


def pick_device(device: str) -> str:
    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() else "cpu"


def _load(kind: Any, folder: Path, **options: Any) -> Any:
    try:
        return kind.from_pretrained(folder, **options)
    except (OSError, ValueError, KeyError) as error:
        raise EncoderError(
            f"{folder} holds no encoder that transformers can load: {type(error).__name__}: {error}"
        ) from error


def _check_weights(module: nn.Module, missing: Collection[str], folder: Path) -> None:
    """transformers fills what a file lacks with random numbers; only a pooler, which is not used here, may be so."""
    used = {name for name, _ in module.named_parameters() if not name.startswith("pooler.")}
    absent = sorted(used & {name.removeprefix("encoder.") if name not in used else name for name in missing})
    if absent:
        raise EncoderError(f"{folder} lacks {len(absent)} weights of the encoder, first {absent[0]}; it is incomplete")


@dataclass(frozen=True, slots=True)
class _Shipped:
    """What the makers wrote down beside the weights, in sentence-transformers' files."""

    pooling: Pooling | None
    normalize: bool
    max_tokens: int | None
    prompts: dict[str, str]
    linear_layers: list[nn.Module]

    @classmethod
    def read(cls, folder: Path) -> _Shipped:
        modules: list[dict[str, Any]] = _json(folder / "modules.json") or []
        pooling: Pooling | None = None
        linear: list[nn.Module] = []
        kinds = [str(module["type"]).rpartition(".")[2] for module in modules]
        for kind, module in zip(kinds, modules, strict=True):
            place = folder / module["path"]
            if kind == "Pooling":
                pooling = _shipped_pooling(_json(place / "config.json") or {}, place)
            elif kind == "Dense":
                linear.append(_linear(place))
            elif kind not in ("Transformer", "Normalize"):
                raise EncoderError(
                    f"{folder}/modules.json asks for {kind!r}, which is not known here (known: Transformer, Pooling, "
                    "Dense, Normalize); choose another encoder, or a server of embeddings behind `retrieval.url`"
                )
        prompts = (_json(folder / "config_sentence_transformers.json") or {}).get("prompts") or {}
        longest = (_json(folder / "sentence_bert_config.json") or {}).get("max_seq_length")
        return cls(pooling, "Normalize" in kinds, longest, prompts, linear)


def _shipped_pooling(config: dict[str, Any], place: Path) -> Pooling:
    names: dict[str, Pooling] = {
        "pooling_mode_mean_tokens": "mean",
        "pooling_mode_cls_token": "cls",
        "pooling_mode_lasttoken": "last",
        "pooling_mode_max_tokens": "max",
    }
    short = {"mean": "mean", "cls": "cls", "lasttoken": "last", "max": "max"}
    asked = [key for key, on in config.items() if key.startswith("pooling_mode_") and on is True]
    if isinstance(config.get("pooling_mode"), str):  # how later versions write it
        asked = [config["pooling_mode"]]
        names |= short  # type: ignore[arg-type]
    if len(asked) != 1 or asked[0] not in names:
        raise EncoderError(f"{place}/config.json asks for pooling {asked}; known, one at a time: {sorted(names)}")
    return names[asked[0]]


def _linear(place: Path) -> nn.Module:
    config = _json(place / "config.json") or {}
    layer = nn.Linear(config["in_features"], config["out_features"], bias=config.get("bias", True))
    weights = load_file(place / "model.safetensors")
    layer.load_state_dict({name.removeprefix("linear."): value for name, value in weights.items()})
    activation = str(config.get("activation_function", "torch.nn.modules.linear.Identity")).rpartition(".")[2]
    if activation not in ("Identity", "Tanh", "ReLU", "GELU"):
        raise EncoderError(f"{place}/config.json asks for the activation {activation!r}, which is not known here")
    return nn.Sequential(layer, getattr(nn, activation)()).eval().requires_grad_(False)


def _settings(config: EncoderConfig, name: str, folder: Path, shipped: _Shipped, longest: int) -> EncoderSettings:
    query, passage = family_prefixes(name)
    query = shipped.prompts.get("query") or query
    passage = shipped.prompts.get("passage") or shipped.prompts.get("document") or passage
    max_tokens = config.max_tokens or min(shipped.max_tokens or longest, longest)
    if max_tokens > longest:
        raise EncoderError(f"max_tokens is {max_tokens}, but {name} reads at most {longest} tokens")
    return EncoderSettings(
        name=name,
        sha256=_sha256_of_model(folder),
        pooling=config.pooling or shipped.pooling or "mean",
        normalize=config.normalize if config.normalize is not None else shipped.normalize or not shipped.pooling,
        query_prefix=query if config.query_prefix is None else config.query_prefix,
        passage_prefix=passage if config.passage_prefix is None else config.passage_prefix,
        max_tokens=max_tokens,
    )


def _longest(config: AutoConfig, tokenizer: Any) -> int:
    """Tokens that the model can read. RoBERTa-like ones lose two positions to padding, which their tokenizers know."""
    positions = getattr(config, "max_position_embeddings", None) or 512
    return min(positions, tokenizer.model_max_length) if tokenizer.model_max_length < 10**6 else positions


def _sha256_of_model(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and _HASHED.fullmatch(path.name):
            with path.open("rb") as stream:
                inside = hashlib.file_digest(stream, "sha256").hexdigest()
            digest.update(f"{path.relative_to(folder)} {inside}\n".encode())
    return digest.hexdigest()


def _json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
