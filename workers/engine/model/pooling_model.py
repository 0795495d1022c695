"""Embedders and rerankers: their tokens, and their forward pass over a batch of rows.

The model code is that of mlx-vlm. Rows are padded at their end: no token of a decoder looks there,
and a mask hides the padding from encoders. Vectors and scores are computed in single precision.

Scores are those of sentence-transformers' cross-encoders with a sigmoid, and of Qwen3-Reranker
(arXiv 2506.05176, section 3.2): the probability of "yes" against "no" as the answer.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import mlx.core as mx
import numpy as np
from mlx_vlm.embedding_loader import load_embedding_model
from mlx_vlm.encoder_loader import load_encoder_model
from mlx_vlm.models.pooling import normalize_embeddings, pool_by_config, read_pooling_config
from mlx_vlm.reranker_loader import load_sequence_classification_model
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

from paceline.request.pooling import Input
from paceline.request.profile import Endpoint
from workers.engine.model.device import cast_for_device
from workers.engine.model.model_folder import (
    DECODERS,
    ENCODERS,
    check_folder,
    forbid_code,
    positive,
)
from workers.engine.text.long_text import PIECE_CHARS, chars_beyond

Floats = NDArray[np.float32]
Tokens = NDArray[np.int32]

_MAX_CONTEXT_TOKENS = 1 << 20
_DEFAULT_CONTEXT_TOKENS = 8192
"""Of a ModernBERT whose configuration has none."""
_LENGTH_FIELDS = {
    "tokenizer_config.json": "model_max_length",
    "sentence_bert_config.json": "max_seq_length",
}
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_BEFORE_PAIR = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
_AFTER_PAIR = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
"""The prompt of Qwen3-Reranker, as its model card has it."""


class TokenRow(NamedTuple):
    """The tokens of one text or pair; `types` marks those of the document for an encoder."""

    tokens: Tokens
    types: Sequence[int] = ()

    @classmethod
    def of(cls, tokens: Sequence[int], types: Sequence[int] = ()) -> Self:
        """Return the row of these tokens."""
        return cls(np.array(tokens, dtype=np.int32), types)


class PoolingModel(ABC):
    """A model that reads a row of tokens once and returns numbers."""

    endpoint: ClassVar[Endpoint]

    def __init__(self, folder: Path, config: Mapping[str, Any], module: Any) -> None:
        self.module = module
        self._tokenizer = _read_tokenizer(folder)
        # Text is text: what spells a control token is none.
        self._tokenizer.encode_special_tokens = True
        self.vocabulary = positive("vocab_size", config.get("vocab_size"))
        self._padding = min(_padding(config), self.vocabulary - 1)
        self.context_tokens = _context_tokens(folder, config)
        self.dimensions = 1
        """The numbers that it returns for a row."""

    def forward(self, rows: Sequence[TokenRow]) -> Floats:
        """Return the numbers [rows, dimensions] of a batch; runs on the thread of MLX."""
        longest = max(len(row.tokens) for row in rows)
        tokens = np.full((len(rows), longest), self._padding, dtype=np.int32)
        types = np.zeros_like(tokens)
        mask = np.zeros_like(tokens)
        for index, row in enumerate(rows):
            tokens[index, : len(row.tokens)] = row.tokens
            types[index, : len(row.types)] = row.types
            mask[index, : len(row.tokens)] = 1
        numbers = self._read(mx.array(tokens), mx.array(mask), mx.array(types))
        return np.array(numbers.astype(mx.float32)).reshape(len(rows), self.dimensions)

    def _encode(self, texts: Sequence[str]) -> Iterator[Encoding]:
        """Yield the tokens of texts, a few at a time; some beyond the context may be missing."""
        batch: list[str] = []
        chars = 0
        for text in texts:
            beyond = chars_beyond(text, self.context_tokens, self._count)
            batch.append(text[: beyond.chars] if beyond else text)
            chars += len(batch[-1])
            if chars > PIECE_CHARS:
                yield from self._tokenizer.encode_batch(batch, add_special_tokens=False)
                batch, chars = [], 0
        yield from self._tokenizer.encode_batch(batch, add_special_tokens=False)

    def _count(self, piece: str) -> int:
        return len(self._tokenizer.encode(piece, add_special_tokens=False))

    @abstractmethod
    def _read(self, tokens: mx.array, mask: mx.array, types: mx.array) -> mx.array:
        """Return the numbers of rows of equal length; `mask` is 0 for the padding."""


class Embedder(PoolingModel):
    """A model that returns a vector of length 1 for a text."""

    endpoint = Endpoint.EMBEDDINGS

    def __init__(self, folder: Path, config: Mapping[str, Any], module: Any) -> None:
        super().__init__(folder, config, module)
        self.dimensions = positive("hidden_size", config.get("hidden_size"))
        self._decodes = config["model_type"] in DECODERS
        """Whether it reads from left to right, so the last token has read all others."""
        mode = "lasttoken" if self._decodes else "mean"
        self._pooling = read_pooling_config(folder) or {"pooling_mode": mode}

    def rows(self, inputs: Sequence[Input], *, truncate: bool) -> list[TokenRow]:
        """Return the tokens of texts, cut to the context if `truncate`; given tokens stay."""
        marks = self._tokenizer.num_special_tokens_to_add(is_pair=False)
        encodings = self._encode([one for one in inputs if isinstance(one, str)])
        rows = []
        for one in inputs:
            if isinstance(one, str):
                encoding = next(encodings)
                if truncate:
                    encoding.truncate(self.context_tokens - marks)
                rows.append(TokenRow.of(self._tokenizer.post_process(encoding).ids))
            else:
                rows.append(TokenRow.of(one[: self.context_tokens] if truncate else one))
        return rows

    def _read(self, tokens: mx.array, mask: mx.array, types: mx.array) -> mx.array:  # noqa: ARG002
        if self._decodes:
            hidden = self.module.model(tokens)
        else:
            hidden = self.module(tokens, attention_mask=mask).last_hidden_state
        pooled = pool_by_config(hidden.astype(mx.float32), mask, self._pooling)
        return normalize_embeddings(pooled)


class Reranker(PoolingModel):
    """A model that returns how relevant a document is to a query, from 0 to 1."""

    endpoint = Endpoint.RERANK

    @abstractmethod
    def rows(
        self, query: str, documents: Sequence[str], *, document_tokens: int | None, truncate: bool
    ) -> list[TokenRow]:
        """Return the tokens of pairs; the end of each document is cut as asked."""


class CrossEncoder(Reranker):
    """An encoder that reads query and document as a pair."""

    def rows(
        self, query: str, documents: Sequence[str], *, document_tokens: int | None, truncate: bool
    ) -> list[TokenRow]:
        """Return the tokens of pairs; the end of each document is cut as asked."""
        (first,) = self._encode([query])
        marks = self._tokenizer.num_special_tokens_to_add(is_pair=True)
        room = max(self.context_tokens - marks - len(first.ids), 0) if truncate else None
        limit = min((one for one in (room, document_tokens) if one is not None), default=None)
        rows = []
        for document in self._encode(documents):
            if limit is not None:
                document.truncate(limit)
            pair: Encoding = self._tokenizer.post_process(first, document)
            rows.append(TokenRow.of(pair.ids, pair.type_ids))
        return rows

    def _read(self, tokens: mx.array, mask: mx.array, types: mx.array) -> mx.array:
        if getattr(self.module.config, "type_vocab_size", 1) < 2:
            types = mx.zeros_like(types)
        output = self.module(tokens, attention_mask=mask, token_type_ids=types)
        return mx.sigmoid(output.logits.astype(mx.float32))


class DecoderReranker(Reranker):
    """A chat model that was trained to answer yes or no."""

    def __init__(self, folder: Path, config: Mapping[str, Any], module: Any) -> None:
        super().__init__(folder, config, module)
        prompt = _read_tokenizer(folder)
        self._before = prompt.encode(_BEFORE_PAIR, add_special_tokens=False).ids
        self._after = prompt.encode(_AFTER_PAIR, add_special_tokens=False).ids
        self._answers = [self._tokenizer.token_to_id(word) for word in ("yes", "no")]
        if None in self._answers:
            raise ValueError("the tokenizer has no tokens 'yes' and 'no'")

    def rows(
        self, query: str, documents: Sequence[str], *, document_tokens: int | None, truncate: bool
    ) -> list[TokenRow]:
        """Return the tokens of prompts; the end of each document is cut as asked."""
        head = f"<Instruct>: {_INSTRUCTION}\n<Query>: {query}\n<Document>: "
        room = self.context_tokens - len(self._before) - len(self._after)
        rows = []
        for encoding in self._encode([head + document for document in documents]):
            tokens = encoding.ids
            if document_tokens is not None:
                begin = sum(end <= len(head) for _, end in encoding.offsets)
                tokens = tokens[: begin + document_tokens]
            if truncate:
                tokens = tokens[:room]
            rows.append(TokenRow.of([*self._before, *tokens, *self._after]))
        return rows

    def _read(self, tokens: mx.array, mask: mx.array, types: mx.array) -> mx.array:  # noqa: ARG002
        language = self.module.language_model
        last = mask.sum(axis=1) - 1
        hidden = language.model(tokens)[mx.arange(tokens.shape[0]), last]
        tied = language.args.tie_word_embeddings
        head = language.model.embed_tokens.as_linear if tied else language.lm_head
        scores = head(hidden).astype(mx.float32)
        yes, no = self._answers
        return mx.sigmoid(scores[:, yes] - scores[:, no])


def load_pooling_model(folder: Path, endpoint: Endpoint) -> Embedder | Reranker:
    """Load an embedder or a reranker; runs no code of its folder.

    Raises ValueError for another kind of model, and the errors of the libraries.
    """
    config = check_folder(folder)
    forbid_code()
    _check_family(config)
    family = config["model_type"]
    for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"):
        positive(name, config.get(name))
    _context_tokens(folder, config)  # before the library builds as much
    model: Embedder | Reranker
    if endpoint is Endpoint.EMBEDDINGS:
        model = Embedder(folder, config, load_embedding_model(folder))
    elif family in DECODERS:
        model = DecoderReranker(folder, config, load_encoder_model(folder, model_remapping={}))
    else:
        model = CrossEncoder(folder, config, load_sequence_classification_model(folder))
    cast_for_device(model.module)
    return model


def _check_family(config: Mapping[str, Any]) -> None:
    """Raise ValueError for a model that mlx-vlm's code would not compute as its makers did."""
    family = config.get("model_type")
    if not isinstance(family, str) or family not in ENCODERS | DECODERS:
        known = ", ".join(sorted(ENCODERS | DECODERS))
        raise ValueError(f"embedders and rerankers may be of the families {known}, not {family}")
    activation = "silu" if family in DECODERS else "gelu"
    if config.get("hidden_act", config.get("hidden_activation", activation)) != activation:
        raise ValueError("the activation of the model is not supported")
    if config.get("position_embedding_type", "absolute") != "absolute":
        raise ValueError("the position embeddings of the model are not supported")
    if family in DECODERS and config.get("use_bidirectional_attention"):
        raise ValueError("the model reads in both directions, which is not supported")
    name = next(iter(config.get("architectures") or []), "")
    if family in DECODERS and str(name).endswith("ForSequenceClassification"):
        raise ValueError("a decoder with a classification head is not supported")


def _read_tokenizer(folder: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    # The file has the settings of its last use, such as a padding of all texts to 128 tokens.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _padding(config: Mapping[str, Any]) -> int:
    token = config.get("pad_token_id")
    default = 1 if config["model_type"] == "xlm-roberta" else 0
    return token if type(token) is int and token >= 0 else default


def _context_tokens(folder: Path, config: Mapping[str, Any]) -> int:
    """Return the longest row that the model was made for, by its files."""
    positions = config.get("max_position_embeddings", _DEFAULT_CONTEXT_TOKENS)
    if type(positions) is not int:
        raise ValueError("max_position_embeddings is no number of tokens")
    if config["model_type"] == "xlm-roberta":
        positions -= _padding(config) + 1  # which is the position of the first token
    limits: list[Any] = [positions]
    for name, field in _LENGTH_FIELDS.items():
        path = folder / name
        found = json.loads(path.read_bytes()) if path.exists() else {}
        limits.append(found.get(field) if isinstance(found, dict) else None)
    known = [one for one in limits if type(one) is int and 0 < one <= _MAX_CONTEXT_TOKENS]
    if not known:
        raise ValueError("max_position_embeddings is no number of tokens")
    return min(known)
