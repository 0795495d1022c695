# /// script
# dependencies = ["lm-eval[api]==0.4.13", "transformers==5.23.0"]
# ///
"""The evaluation harness `lm-eval`, on local tasks."""

import json
from pathlib import Path

from bench.clients import cases

TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: "{target}"
"""
CHOICE = """
output_type: multiple_choice
doc_to_choice: ["6", "7", "8", "9"]
metric_list: [{metric: acc}]
"""
GENERATE = """
output_type: generate_until
generation_kwargs: {until: ["\\n"], max_gen_toks: 16, temperature: 0}
metric_list: [{metric: exact_match}]
"""
tasks = Path("tasks")
tasks.mkdir()
data = tasks.absolute() / "questions.jsonl"
rows = [
    {"question": f"What is {first} plus {second}?", "answer": str(first + second)}
    for first in (3, 4)
    for second in (3, 4)
]
data.write_text("".join(json.dumps(row) + "\n" for row in rows))
INDEX = "{{['6', '7', '8', '9'].index(answer)}}"
for kind, target, more in (("choice", INDEX, CHOICE), ("generate", "{{answer}}", GENERATE)):
    task = TASK.format(name=f"local_{kind}", data=data, target=target)
    (tasks / f"{kind}.yaml").write_text(task + more)


def evaluate(model: str, path: str, task: str, metric: str, *options: str) -> str:
    arguments = {
        "model": cases.MODEL,
        "base_url": f"{cases.API}{path}",
        "num_concurrent": 4,
        "max_retries": 1,
    }
    arguments |= {"tokenizer": cases.CHECKPOINT, "tokenizer_backend": "huggingface"}
    output = Path(f"{model}-{task}")
    cases.command(
        *("lm_eval", "--model", model, "--tasks", task, "--include_path", str(tasks.absolute())),
        *("--model_args", ",".join(f"{name}={value}" for name, value in arguments.items())),
        *("--output_path", str(output), *options),
    )
    (record,) = output.rglob("results*.json")
    results = json.loads(record.read_text())["results"][task]
    cases.check(f"{metric},none" in results, results)
    return f"{metric} {results[f'{metric},none']}"


@cases.once("local-completions, multiple choice: token ids, echo, logprobs")
def choice() -> str:
    return evaluate("local-completions", "/completions", "local_choice", "acc")


@cases.once("local-completions, generate: lists of token ids")
def generate() -> str:
    return evaluate("local-completions", "/completions", "local_generate", "exact_match")


@cases.once("local-chat-completions, generate")
def chat() -> str:
    path, model = "/chat/completions", "local-chat-completions"
    return evaluate(model, path, "local_generate", "exact_match", "--apply_chat_template")


if __name__ == "__main__":
    cases.main()
