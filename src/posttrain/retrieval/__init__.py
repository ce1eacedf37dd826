"""Finding passages: corpora, BM25, stored indexes, the HTTP retrieval server and its client.

Knows nothing of tokens, episodes or policies. The server needs the extra `serve`; everything else is core.
"""

from posttrain.retrieval.protocol import Passage, RetrievalError, Retriever

__all__ = ["Passage", "RetrievalError", "Retriever"]
