"""This GPT as Hugging Face's GPT-2: names and shapes, a directory written and read, its description."""
