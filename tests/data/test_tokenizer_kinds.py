"""Every kind of tokenizer: copies in other processes, special tokens in text, text behind a prompt."""
