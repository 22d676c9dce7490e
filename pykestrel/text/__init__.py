"""Text in and out of a model: tokenizer, chat template, streaming detokenizer, stop strings,
thinking. Nothing here knows an engine, and nothing is imported before it is used."""
