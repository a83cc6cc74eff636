"""Data: word problems, drills, GSM8K, the tokenizer, packing, evaluation sets, sources. Nothing here imports torch."""
