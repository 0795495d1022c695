"""Write a tiny model for llama.cpp: `python tiny_gguf.py FILE`, in an environment with `gguf`.

Its weights are random but for a chain: one layer of zeros passes each token on, so the output
matrix alone says which token follows which. After the mark of an answer that is "3 plus 4 is 7.",
and after the mark that its chat template writes where a request has tools, a call of the first
tool. So answers are short, and the same in each run.
"""

import itertools
import sys

import gguf
import numpy as np

SPECIAL = ("<|end|>", "<|user|>", "<|system|>", "<|assistant|>", "<|caller|>", "<|tool|>")
CALL = ("<tool_call>", "</tool_call>")
WORDS = (" plus", " four", " is", " seven", "three", "Paris", "Answer")
CHAINS = (
    ("<|assistant|>", "three", " plus", " four", " is", " seven", ".", "<|end|>"),
    ("<|caller|>", "<tool_call>", "\n"),
    ("Paris", '"'),
    ("</tool_call>", "<|end|>"),
    ("?", "Answer", "!", "<|end|>"),
)
USUAL = {'"': 4.0, "}": 3.5, ":": 3.0, "Paris": 2.5, "{": 2.0, "7": 1.5, "<|end|>": 1.0}
"""What follows a token without a chain, as far as a grammar allows it: the first is likeliest."""
TEMPLATE = """\
{%- if tools %}
    {{- '<|system|>' }}
    {%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] }}{%- endif %}
    {{- "\\n\\n# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools>\\n\\nFor each call, return a json object within <tool_call></tool_call>:\\n" }}
    {{- "<tool_call>\\n{\\"name\\": <name>, \\"arguments\\": <arguments>}\\n</tool_call>" }}
    {{- "<|end|>\\n" }}
{%- elif messages[0]['role'] == 'system' %}
    {{- '<|system|>' + messages[0]['content'] + '<|end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "user" %}
        {{- '<|user|>' + message.content + '<|end|>\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|assistant|>' }}
        {%- if message.content %}{{- message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|tool|>' + message.content + '<|end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {%- if tools and messages[-1].role == "user" %}{{- '<|caller|>' }}
    {%- else %}{{- '<|assistant|>' }}{%- endif %}
{%- endif %}
"""


def byte_names() -> dict[int, str]:
    """Return the characters by which byte-level vocabularies spell bytes, as GPT-2 defines them."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {
        byte: chr(256 + number) for number, byte in enumerate(others)
    }


def main(path: str) -> None:
    """Write the model to this path."""
    names = byte_names()

    def spelled(text: str) -> str:
        return "".join(names[byte] for byte in text.encode())

    plain = [names[byte] for byte in range(256)] + [spelled(word) for word in WORDS]
    tokens = [*plain, *SPECIAL, *CALL]
    tokens += [f"<|unused{number}|>" for number in range(-len(tokens) % 32)]
    kinds = [gguf.TokenType.NORMAL] * len(plain)
    kinds += [gguf.TokenType.CONTROL] * len(SPECIAL)
    kinds += [gguf.TokenType.USER_DEFINED] * len(CALL)
    kinds += [gguf.TokenType.UNUSED] * (len(tokens) - len(kinds))
    place = {token: number for number, token in enumerate(tokens)}
    place |= {word: place[spelled(word)] for word in (*WORDS, "\n")}

    size = len(tokens)
    rng = np.random.default_rng(26)
    follows = rng.normal(0, 0.1, (size, size))
    follows[:, len(plain) + len(SPECIAL) + len(CALL) :] = -20
    for token, score in USUAL.items():
        follows[:, place[token]] = score
    for chain in CHAINS:
        for token, following in itertools.pairwise(chain):
            follows[place[token], place[following]] = 12

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(2048)
    writer.add_embedding_length(size)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_head_count(size // 32)
    writer.add_head_count_kv(1)
    writer.add_rope_dimension_count(32)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([f"{names[ord('e')]} {names[ord('e')]}"])
    writer.add_eos_token_id(place["<|end|>"])
    writer.add_bos_token_id(place["<|system|>"])
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)

    def tensor(name: str, values: np.ndarray) -> None:
        writer.add_tensor(name, np.ascontiguousarray(values, dtype=np.float32))

    tensor("token_embd.weight", np.eye(size))
    tensor("output_norm.weight", np.ones(size))
    # The norm makes the only 1 of a token the root of the size.
    tensor("output.weight", follows.T / np.sqrt(size))
    tensor("blk.0.attn_norm.weight", np.ones(size))
    tensor("blk.0.ffn_norm.weight", np.ones(size))
    for name, rows, columns in (
        ("attn_q", size, size),
        ("attn_k", 32, size),
        ("attn_v", 32, size),
        ("attn_output", size, size),
        ("ffn_gate", 32, size),
        ("ffn_up", 32, size),
        ("ffn_down", size, 32),
    ):
        tensor(f"blk.0.{name}.weight", np.zeros((rows, columns)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main(sys.argv[1])
