"""DSPy's ReAct, whose tool calls are fields of the model's text."""

from __future__ import annotations

import sys

import dspy
from files import read_file, write_file

url, prompt = sys.argv[1:3]
lm = dspy.LM("openai/scripted", api_base=f"{url}/v1", api_key="none", num_retries=0, cache=False)
dspy.configure(lm=lm)
print(dspy.ReAct("wish -> answer", tools=[write_file, read_file])(wish=prompt).answer)
