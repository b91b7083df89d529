"""Tokenizers, detokenizer, chat templates, message formats and grammars."""
