"""The sizes of a model that memory and time depend on."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder with a head; counts are of numbers, not bytes."""

    layers: int
    hidden: int
    intermediate: int  # of the MLP of one token; with experts, of all that a token is sent to
    heads: int
    key_heads: int
    head_size: int  # of queries and keys; values are taken to be as wide
    vocabulary: int
    tied: bool  # the head is the embedding
    query_norms: bool  # queries and keys are normalised (Qwen3, Gemma-3)
    norms: int = 2  # of the stream, in a layer (Gemma-3: 4)
    experts_per_token: int = 0  # 0: no experts
    parameters: int
    layer_parameters: int  # of the largest layer
    adapters: int = 0  # numbers of adapters, which then train in the place of all parameters
    adapter_width: int = 0  # numbers of a token between the factors of a layer's adapters

    @property
    def plain(self) -> bool:
        """Whether layers may be written out (`trainer/lean_layers.py`), as far as sizes tell."""
        return self.norms == 2 and not self.experts_per_token and not self.adapters

    @property
    def trained(self) -> int:
        return self.adapters or self.parameters

    @property
    def trained_layer(self) -> int:
        """Parameters of the largest layer that train."""
        return self.adapters // self.layers if self.adapters else self.layer_parameters

    @property
    def trained_outside(self) -> int:
        """Parameters outside the layers that train."""
        return 0 if self.adapters else self.outside

    @property
    def frozen(self) -> int:
        return self.parameters if self.adapters else 0

    @property
    def query_width(self) -> int:
        return self.heads * self.head_size

    @property
    def key_width(self) -> int:
        return self.key_heads * self.head_size

    @property
    def embedding(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def outside(self) -> int:
        """Parameters that belong to no layer: embedding, last norm, head."""
        return self.embedding * (1 if self.tied else 2) + self.hidden

    @property
    def decoder_parameters(self) -> int:
        """Parameters of layers, embedding and last norm, without an untied head: those of a critic."""
        return self.parameters - (0 if self.tied else self.embedding)

    @property
    def key_value_width(self) -> int:
        """Numbers that all layers cache for a token."""
        return self.layers * 2 * self.key_width

    @property
    def active_parameters(self) -> int:
        """Parameters of the layers that compute one token: all, or with experts those that it is sent to."""
        if not self.experts_per_token:
            return self.layers * self.layer_parameters
        attention = 2 * self.hidden * (self.query_width + self.key_width)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    def part(self, ranks: int) -> ModelShape:
        """What each of `ranks` holds and computes of every layer, and of the vocabulary; see `trainer/tensor.py`."""
        return replace(
            self,
            intermediate=self.intermediate // ranks,
            heads=self.heads // ranks,
            key_heads=self.key_heads // ranks,
            vocabulary=self.vocabulary // (1 if self.vocabulary % ranks else ranks),
            parameters=self.parameters // ranks,
            layer_parameters=self.layer_parameters // ranks,
        )

    def shares_heads(self, ranks: int) -> bool:
        """Whether so many ranks can divide the heads among them; see `trainer/sequence.py`."""
        return self.heads % ranks == 0 and (self.key_heads % ranks == 0 or ranks % self.key_heads == 0)
