"""Between text and tokens: templates, tokenizers, grammars, calls and reasoning."""
