"""Requests for vectors or scores: the bodies of embeddings and rerank, read within bounds.

OpenAI's embeddings, and Jina's rerank with the fields that Cohere's and vLLM's share. `truncate` is
the field of Jina and of text-embeddings-inference for texts that the model does not hold.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from paceline.request.content import chars_of, read_texts
from paceline.request.fields import FieldError, Fields
from paceline.request.keys import Inside, check_keys
from paceline.request.profile import Endpoint, RequestProfile

INPUTS_LIMIT = 2048
"""The maximum number of texts of one request, and of documents; OpenAI allows as many."""
TEXT_LIMIT_CHARS = 8 * 1024 * 1024
"""Of all texts of one request together, a query with each of its documents; a token counts as 4."""
DIMENSIONS_LIMIT = 65_536
ENCODINGS = ("float", "base64")
Input = str | Sequence[int]
"""A text, or the tokens of one."""


class EmbeddingsRequest(NamedTuple):
    """The texts whose vectors a request asks for."""

    model: str
    inputs: tuple[Input, ...]
    base64: bool = False
    """Whether the vectors come as base64 of 32-bit floats, little-endian."""
    dimensions: int | None = None
    """The first so many numbers of each vector; None: all."""
    truncate: bool = False
    """Cut the end of a text that is too long, which is refused otherwise."""


class RerankRequest(NamedTuple):
    """The documents that a request asks to rank."""

    model: str
    query: str
    documents: tuple[str, ...]
    top_n: int | None = None
    """The number of results; None: one for each document."""
    return_documents: bool = True
    """Whether each result has its document; Jina's default."""
    truncate: bool = False
    """Cut the end of a document that is too long, which is refused otherwise."""
    document_tokens: int | None = None
    """The most tokens of a document, whose end is cut."""


def read_embeddings(body: Mapping[str, Any], access: type[Fields] = Fields) -> EmbeddingsRequest:
    """Return the request of a parsed body; raise `FieldError` for the first invalid field."""
    fields = access(body)
    encoding = body.get("encoding_format")
    if encoding is not None and encoding not in ENCODINGS:
        raise FieldError("encoding_format", "'encoding_format' must be float or base64.")
    return EmbeddingsRequest(
        model=fields.text("model"),
        inputs=read_texts(body, "input", INPUTS_LIMIT),
        base64=encoding == "base64",
        dimensions=fields.integer("dimensions", None, low=1, high=DIMENSIONS_LIMIT),
        truncate=fields.flag("truncate"),
    )


def read_rerank(
    body: Mapping[str, Any],
    access: type[Fields] = Fields,
    inside: Inside | None = None,
) -> RerankRequest:
    """Return the request of a parsed body; raise `FieldError` for the first invalid field."""
    fields = access(body)
    return RerankRequest(
        model=fields.text("model"),
        query=fields.text("query"),
        documents=_read_documents(body.get("documents"), Inside() if inside is None else inside),
        top_n=fields.integer("top_n", None, low=1),
        return_documents=fields.choice("return_documents") is not False,
        truncate=fields.flag("truncate"),
        document_tokens=fields.integer("max_tokens_per_doc", None, low=1),
    )


def pooling_profile(
    body: Mapping[str, Any], endpoint: Endpoint, access: type[Fields], ignored: Sequence[str]
) -> RequestProfile:
    """Return what the policy may use of a request for vectors or scores; raise `FieldError`."""
    inside = Inside()
    if endpoint is Endpoint.EMBEDDINGS:
        embeddings = read_embeddings(body, access)
        model, texts, param = embeddings.model, embeddings.inputs, "input"
        chars = chars_of(texts)
    else:
        rerank = read_rerank(body, access, inside)
        model, texts, param = rerank.model, rerank.documents, "documents"
        chars = len(texts) * len(rerank.query) + chars_of(texts)  # the model reads pairs
    if chars > TEXT_LIMIT_CHARS:
        raise FieldError(
            param, f"The texts of a request may have at most {TEXT_LIMIT_CHARS} characters."
        )
    return RequestProfile(
        endpoint=endpoint,
        model=model,
        max_tokens=0,  # nothing is generated, so no answer costs a key anything
        messages=len(texts),
        prompts=len(texts),
        text_chars=chars,
        ignored=(*ignored, *inside),
    )


def _read_documents(given: Any, inside: Inside) -> tuple[str, ...]:
    if not isinstance(given, list) or not 1 <= len(given) <= INPUTS_LIMIT:
        raise FieldError("documents", f"'documents' must be a list of 1 to {INPUTS_LIMIT}.")
    texts = []
    for index, one in enumerate(given):
        text = one.get("text") if isinstance(one, Mapping) else one
        if not isinstance(text, str):
            raise FieldError(
                f"documents[{index}]", "A document must be a string, or an object with a 'text'."
            )
        check_keys("RERANK documents", one, inside, f"documents[{index}]")
        texts.append(text)
    return tuple(texts)
