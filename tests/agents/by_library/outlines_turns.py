"""Outlines: each turn's answer has a JSON schema."""

from __future__ import annotations

import sys

import outlines
from files import read_file, write_file
from openai import OpenAI
from outlines.inputs import Chat
from pydantic import BaseModel


class WriteFile(BaseModel):
    path: str
    content: str


class ReadFile(BaseModel):
    path: str


class FinalAnswer(BaseModel):
    answer: str


url, prompt = sys.argv[1:3]
client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
model = outlines.from_openai(client, "scripted")
chat = Chat([{"role": "user", "content": prompt}])
said = model(chat, WriteFile)
wish = WriteFile.model_validate_json(said)
chat.add_assistant_message(said)
chat.add_user_message(write_file(wish.path, wish.content))
said = model(chat, ReadFile)
chat.add_assistant_message(said)
chat.add_user_message("<shown>" + read_file(ReadFile.model_validate_json(said).path))
print(FinalAnswer.model_validate_json(model(chat, FinalAnswer)).answer)
