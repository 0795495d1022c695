import pytest
from llguidance import LLTokenizer
from llguidance.hf import from_tokenizer
from transformers import AutoTokenizer

from workers.demo import CHECKPOINT


@pytest.fixture(scope="session")
def tokenizer() -> LLTokenizer:
    """Return the tokenizer of the demo model, as grammars know it."""
    return from_tokenizer(AutoTokenizer.from_pretrained(str(CHECKPOINT)))
