"""Text: tokenizer, detokenizer, chat templates and structured outputs."""
