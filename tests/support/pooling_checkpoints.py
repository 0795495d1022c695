"""Tiny random embedders and rerankers in folders as their makers publish them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

Shapes = dict[str, tuple[int, ...]]
"""Of the tensors of a model, by their names."""

WORDS = (
    "a the of and is to in cat dog sat mat river stone paris berlin capital france germany city "
    "what where who red green blue fast slow machine learning model text query document".split()
)
DIMENSIONS = 32
CONTEXT_TOKENS = 64
_LAYERS = 2
_HEADS = 4


def write_qwen3_embedding(folder: Path) -> Path:
    """Write a folder such as Qwen/Qwen3-Embedding-0.6B."""
    _write_qwen3(folder, prefix="", end=True)
    _write_json(folder / "modules.json", _modules("Transformer", "Pooling", "Normalize"))
    pooling = {"word_embedding_dimension": DIMENSIONS, "pooling_mode_lasttoken": True}
    pooling |= {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": False}
    _write_json(folder / "1_Pooling" / "config.json", pooling | {"include_prompt": True})
    return folder


def write_qwen3_reranker(folder: Path) -> Path:
    """Write a folder such as Qwen/Qwen3-Reranker-0.6B: only its name tells what it is."""
    return _write_qwen3(folder, prefix="model.", end=False, context_tokens=1024)


def write_bert_embedder(folder: Path, pooling: str = "cls") -> Path:
    """Write a folder such as BAAI/bge-small-en-v1.5."""
    _write_bert(folder, {"architectures": ["BertModel"]}, prefix="")
    _write_json(folder / "modules.json", _modules("Transformer", "Pooling", "Normalize"))
    name = {"cls": "cls_token", "mean": "mean_tokens"}[pooling]
    _write_json(folder / "1_Pooling" / "config.json", {f"pooling_mode_{name}": True})
    return folder


def write_bert_cross_encoder(folder: Path) -> Path:
    """Write a folder such as cross-encoder/ms-marco-MiniLM-L6-v2."""
    return _write_bert(
        folder,
        {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "LABEL_0"}},
        prefix="bert.",
        head=_linear("bert.pooler.dense", DIMENSIONS) | _linear("classifier", 1),
    )


def write_xlm_roberta_cross_encoder(folder: Path) -> Path:
    """Write a folder such as BAAI/bge-reranker-v2-m3."""
    tokenizer = _word_tokenizer(("<s>", "</s>", "<unk>", "<pad>"), "$A:0", "</s> $B:0")
    vocabulary = tokenizer.get_vocab_size()
    config = _encoder_config("xlm-roberta", vocabulary) | {
        "architectures": ["XLMRobertaForSequenceClassification"],
        "id2label": {"0": "LABEL_0"},
        "layer_norm_eps": 1e-5,
        "max_position_embeddings": CONTEXT_TOKENS + 2,
        "pad_token_id": tokenizer.token_to_id("<pad>"),
        "type_vocab_size": 1,
    }
    shapes = _encoder_shapes("roberta.", vocabulary, CONTEXT_TOKENS + 2, types=1)
    shapes |= _linear("classifier.dense", DIMENSIONS) | _linear("classifier.out_proj", 1)
    return _write(folder, config, shapes, tokenizer)


def write_modernbert_embedder(folder: Path) -> Path:
    """Write a folder such as nomic-ai/modernbert-embed-base."""
    tokenizer = _word_tokenizer(("[CLS]", "[SEP]", "[UNK]", "[PAD]"), "$A:0", "$B:1")
    vocabulary, inner = tokenizer.get_vocab_size(), 2 * DIMENSIONS
    config = {
        "architectures": ["ModernBertModel"],
        "model_type": "modernbert",
        "vocab_size": vocabulary,
        "hidden_size": DIMENSIONS,
        "num_hidden_layers": 3,
        "num_attention_heads": _HEADS,
        "intermediate_size": inner,
        "max_position_embeddings": CONTEXT_TOKENS,
        "norm_eps": 1e-5,
        "global_attn_every_n_layers": 3,
        "local_attention": 8,
        "hidden_activation": "gelu",
        "pad_token_id": tokenizer.token_to_id("[PAD]"),
    }
    shapes: Shapes = {"embeddings.tok_embeddings.weight": (vocabulary, DIMENSIONS)}
    shapes |= {"embeddings.norm.weight": (DIMENSIONS,), "final_norm.weight": (DIMENSIONS,)}
    for layer in range(3):
        shapes |= {
            f"layers.{layer}.{name}.weight": shape
            for name, shape in (
                ("attn_norm", (DIMENSIONS,)),
                ("attn.Wqkv", (3 * DIMENSIONS, DIMENSIONS)),
                ("attn.Wo", (DIMENSIONS, DIMENSIONS)),
                ("mlp_norm", (DIMENSIONS,)),
                ("mlp.Wi", (2 * inner, DIMENSIONS)),
                ("mlp.Wo", (DIMENSIONS, inner)),
            )
            if layer or name != "attn_norm"
        }
    return _write(folder, config, shapes, tokenizer)


def _write_qwen3(
    folder: Path, *, prefix: str, end: bool, context_tokens: int = CONTEXT_TOKENS
) -> Path:
    tokenizer = _byte_tokenizer(end=end)
    vocabulary, width, kv_heads = tokenizer.get_vocab_size(), 8, 2
    inner = 2 * DIMENSIONS
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "eos_token_id": tokenizer.token_to_id("<|endoftext|>"),
        "head_dim": width,
        "hidden_act": "silu",
        "hidden_size": DIMENSIONS,
        "intermediate_size": inner,
        "max_position_embeddings": context_tokens,
        "model_type": "qwen3",
        "num_attention_heads": _HEADS,
        "num_hidden_layers": _LAYERS,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1_000_000,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size": vocabulary,
    }
    shapes: Shapes = {f"{prefix}embed_tokens.weight": (vocabulary, DIMENSIONS)}
    shapes[f"{prefix}norm.weight"] = (DIMENSIONS,)
    for layer in range(_LAYERS):
        shapes |= {
            f"{prefix}layers.{layer}.{name}.weight": shape
            for name, shape in (
                ("input_layernorm", (DIMENSIONS,)),
                ("post_attention_layernorm", (DIMENSIONS,)),
                ("self_attn.q_norm", (width,)),
                ("self_attn.k_norm", (width,)),
                ("self_attn.q_proj", (_HEADS * width, DIMENSIONS)),
                ("self_attn.k_proj", (kv_heads * width, DIMENSIONS)),
                ("self_attn.v_proj", (kv_heads * width, DIMENSIONS)),
                ("self_attn.o_proj", (DIMENSIONS, _HEADS * width)),
                ("mlp.gate_proj", (inner, DIMENSIONS)),
                ("mlp.up_proj", (inner, DIMENSIONS)),
                ("mlp.down_proj", (DIMENSIONS, inner)),
            )
        }
    return _write(folder, config, shapes, tokenizer)


def _write_bert(
    folder: Path, changes: Mapping[str, Any], *, prefix: str, head: Shapes | None = None
) -> Path:
    tokenizer = _word_tokenizer(("[CLS]", "[SEP]", "[UNK]", "[PAD]"), "$A:0", "$B:1")
    # As the published file of all-MiniLM-L6-v2 has it.
    tokenizer.enable_padding(length=16)
    tokenizer.enable_truncation(max_length=16)
    vocabulary = tokenizer.get_vocab_size()
    config = _encoder_config("bert", vocabulary) | {"type_vocab_size": 2, **changes}
    shapes = _encoder_shapes(prefix, vocabulary, CONTEXT_TOKENS, types=2) | (head or {})
    return _write(folder, config, shapes, tokenizer)


def _encoder_config(model_type: str, vocabulary: int) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "hidden_act": "gelu",
        "hidden_size": DIMENSIONS,
        "intermediate_size": 2 * DIMENSIONS,
        "layer_norm_eps": 1e-12,
        "max_position_embeddings": CONTEXT_TOKENS,
        "num_attention_heads": _HEADS,
        "num_hidden_layers": _LAYERS,
        "pad_token_id": 0,
        "position_embedding_type": "absolute",
        "vocab_size": vocabulary,
    }


def _encoder_shapes(prefix: str, vocabulary: int, positions: int, *, types: int) -> Shapes:
    at, inner = f"{prefix}embeddings.", 2 * DIMENSIONS
    shapes: Shapes = {
        f"{at}word_embeddings.weight": (vocabulary, DIMENSIONS),
        f"{at}position_embeddings.weight": (positions, DIMENSIONS),
        f"{at}token_type_embeddings.weight": (types, DIMENSIONS),
        **_norm(f"{at}LayerNorm"),
    }
    for layer in range(_LAYERS):
        at = f"{prefix}encoder.layer.{layer}."
        for name in ("self.query", "self.key", "self.value", "output.dense"):
            shapes |= _linear(f"{at}attention.{name}", DIMENSIONS)
        shapes |= _norm(f"{at}attention.output.LayerNorm") | _norm(f"{at}output.LayerNorm")
        shapes |= _linear(f"{at}intermediate.dense", inner)
        shapes |= _linear(f"{at}output.dense", DIMENSIONS, inner)
    return shapes


def _byte_tokenizer(*, end: bool) -> Tokenizer:
    """Return a tokenizer of bytes, as Qwen's: each text ends with a mark if `end`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(alphabet)}
    merges = [("y", "e"), ("ye", "s"), ("n", "o")]
    vocabulary |= {"".join(pair): len(alphabet) + index for index, pair in enumerate(merges)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    marks = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    tokenizer.add_special_tokens([AddedToken(mark, normalized=False) for mark in marks])
    tokenizer.add_tokens(["<think>", "</think>"])
    if end:
        token = tokenizer.token_to_id("<|endoftext|>")
        tokenizer.post_processor = TemplateProcessing(
            single="$A <|endoftext|>",
            pair="$A $B <|endoftext|>",
            special_tokens=[("<|endoftext|>", token)],
        )
    return tokenizer


def _word_tokenizer(marks: tuple[str, str, str, str], first: str, second: str) -> Tokenizer:
    """Return a tokenizer of words with the marks of an encoder around texts and pairs."""
    begin, end, unknown, padding = marks
    tokens = (
        (begin, padding, end, unknown) if padding == "<pad>" else (padding, begin, end, unknown)
    )
    vocabulary = {token: index for index, token in enumerate((*tokens, *WORDS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=unknown))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(list(tokens))
    closing = f"{second} {end}:1" if second.endswith(":1") else f"{second} {end}"
    tokenizer.post_processor = TemplateProcessing(
        single=f"{begin} {first} {end}",
        pair=f"{begin} {first} {end} {closing}",
        special_tokens=[(begin, vocabulary[begin]), (end, vocabulary[end])],
    )
    return tokenizer


def _write(folder: Path, config: Mapping[str, Any], shapes: Shapes, tokenizer: Tokenizer) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", config)
    _write_json(folder / "tokenizer_config.json", {"model_max_length": int(1e30)})
    tokenizer.save(str(folder / "tokenizer.json"))
    rng = np.random.default_rng(1)
    weights = {}
    for name, shape in shapes.items():
        numbers = rng.standard_normal(shape)
        is_norm = len(shape) == 1 and name.endswith("weight")
        weights[name] = (1 + numbers * 0.1 if is_norm else numbers * 0.3).astype(np.float32)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def _write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def _modules(*names: str) -> list[dict[str, Any]]:
    return [
        {"idx": index, "name": str(index), "path": f"{index}_{name}" if index else "",
         "type": f"sentence_transformers.models.{name}"}
        for index, name in enumerate(names)
    ]  # fmt: skip


def _linear(name: str, rows: int, columns: int = DIMENSIONS) -> Shapes:
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}


def _norm(name: str) -> Shapes:
    return {f"{name}.weight": (DIMENSIONS,), f"{name}.bias": (DIMENSIONS,)}
