"""What the commands `index` and `serve-search` do. A BM25 index is built and served without loading torch."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from posttrain.retrieval.index import build_index, load_index
from posttrain.retrieval.protocol import Retriever
from posttrain.retrieval.storage import read_manifest

METHODS = ("bm25", "dense", "hybrid")


def build(
    corpus: Path, out: Path, method: str, encoder: str | None, settings: Sequence[str], **options: Any
) -> dict[str, Any]:
    """Builds an index of a method and returns its manifest; `options`: empty, overwrite, on_progress.

    settings: "bm25.k1=0.9", "encoder.max_tokens=180", "vectors.kind=ivf". Raises ValueError for an unknown method or
    setting, and what the builders raise.
    """
    if method not in METHODS:
        raise ValueError(f"unknown index method {method!r}; known: {', '.join(METHODS)}")
    given = nested(settings)
    _check_sections(given, ("bm25",) if method == "bm25" else ("encoder", "vectors"))
    if method == "bm25":
        if encoder is not None:
            raise ValueError("a BM25 index needs no encoder; say --method dense or hybrid")
        return build_index(corpus, out, **_bm25_settings(given.get("bm25", {})), **options)
    if encoder is None:
        raise ValueError(f"method {method} needs an encoder: --encoder DIRECTORY or a name of the hub")
    opened = _with_models()
    encoding, keeping = given.get("encoder", {}), given.get("vectors", {})
    _check_sections(encoding, [key for key in opened.EncoderConfig.model_fields if key != "model"])  # --encoder is it
    _check_sections(keeping, [*opened.VectorOptions.model_fields])
    config, kept = opened.EncoderConfig(model=encoder, **encoding), opened.VectorOptions(**keeping)
    builder = opened.build_dense_index if method == "dense" else opened.build_hybrid_index
    return builder(corpus, out, config, kept, **options)


def open_for_serving(index: Path, settings: Sequence[str]) -> tuple[Retriever, dict[str, Any]]:
    """The retriever that an index and `settings` of the section `retrieval` make, and what /healthz says of it."""
    manifest = read_manifest(index)
    about = {"method": manifest["method"], "passages": manifest["counts"]["passages"]}
    if manifest["method"] == "bm25" and not settings:
        return load_index(index), about
    config = importlib.import_module("posttrain.retrieval.config")
    given = nested(settings)
    if "index" in given:
        raise ValueError(f"the index that is served is {index}; leave the setting 'index' out")
    return config.make_retriever(config.RetrievalConfig(index=index, **given)), about


def token_of(variable: str | None) -> str | None:
    """The token that an environment variable holds; raises ValueError when it is named and empty."""
    if variable is None:
        return None
    token = os.environ.get(variable, "").strip()
    if not token:
        raise ValueError(f"the environment variable {variable} holds no token; set it, or leave --token-env out")
    return token


def nested(settings: Sequence[str]) -> dict[str, Any]:
    """["a.b=1", "c=x"] -> {"a": {"b": 1}, "c": "x"}; values are YAML."""
    made: dict[str, Any] = {}
    for setting in settings:
        key, sign, value = setting.partition("=")
        if not sign or not key:
            raise ValueError(f"expected key=value, got {setting!r}")
        *parents, last = key.split(".")
        place = made
        for parent in parents:
            place = place.setdefault(parent, {})
            if not isinstance(place, dict):
                raise ValueError(f"{setting!r}: another setting makes {parent} a {type(place).__name__}")
        try:
            place[last] = yaml.safe_load(value)
        except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date that there is not
            raise ValueError(f"the value of {setting!r} is no YAML: {' '.join(str(error).split())}") from error
    return made


def _bm25_settings(given: Any) -> dict[str, Any]:
    _check_sections(given, ("k1", "b", "unspaced"))
    settings = {key: _number(value) for key, value in given.items()}
    for key, value in settings.items():
        wanted = (bool, type(None)) if key == "unspaced" else (int, float)
        if not isinstance(value, wanted) or (key != "unspaced" and isinstance(value, bool)):
            what = "true, false or null" if key == "unspaced" else "a number"
            raise ValueError(f"bm25.{key} is {what}, got {given[key]!r}")
    return settings


def _number(value: Any) -> Any:
    """1e-1 and inf, which are text to YAML, as the numbers they are; anything else unchanged."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _check_sections(given: Any, known: Sequence[str]) -> None:
    if not isinstance(given, dict):
        raise ValueError(f"expected settings such as {known[0]}=..., got {given!r}")
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ValueError(f"unknown setting {unknown[0]!r} here; known: {', '.join(known)}")


def _with_models() -> Any:
    """The part that loads torch and transformers, which take seconds."""
    return importlib.import_module("posttrain.retrieval.opening")
