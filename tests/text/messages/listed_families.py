"""Families of models that write calls in lists, of JSON or as in Python, or one by one with marks
of their own, or in elements; as `families.Family` takes them."""

from __future__ import annotations

from typing import Any

_LLAMA = "<|start_header_id|>assistant<|end_header_id|>\n\n"
_CHATML = "<|im_start|>assistant\n"
_THINK = ("<think>\n", "\n</think>\n\n")
_CALL = '{"name": "{name}", "arguments": {arguments}}'
_PYTHON: dict[str, Any] = {"call": "{name}({arguments})", "argument": "python", "is_json": False}
_CHAT = "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"

MARK_OF_M3 = "]<]minimax[>["

_LISTED: dict[str, Any] = {
    "format": "tool-calls",
    "model_type": "jamba",
    "chat_template": "<|assistant|> <tool_calls>[{{ calls }}]</tool_calls>",
    "turn": "<|assistant|>\n",
    "open": "<tool_calls>[",
    "call": _CALL,
    "between": ", ",
    "close": "]</tool_calls>",
}
_COMMAND: dict[str, Any] = {
    "format": "command",
    "model_type": "cohere2",
    "chat_template": "<|START_ACTION|> <|START_THINKING|> <|START_RESPONSE|>",
    "turn": _CHAT,
    "open": "<|START_ACTION|>[\n    ",
    "call": '{"tool_call_id": "0", "tool_name": "{name}", "parameters": {arguments}}',
    "between": ",\n    ",
    "close": "\n]<|END_ACTION|>",
    "reasoning": ("<|START_THINKING|>", "<|END_THINKING|>"),
    "answer": "<|START_RESPONSE|>",
    "answered": "<|END_RESPONSE|>",
}
_GIGACHAT: dict[str, Any] = {
    "format": "gigachat-3.1",
    "model_type": "deepseek_v3",
    "chat_template": "assistant<|role_sep|> <|function_call|>",
    "turn": "assistant<|role_sep|>\n",
    "call": "<|function_call|>" + _CALL,
    "between": "<|message_sep|>",
}

LISTED: dict[str, dict[str, Any]] = {
    "Jamba": _LISTED,
    "MiniMax-M1": _LISTED | {"open": "<tool_calls>\n", "between": "\n", "close": "\n</tool_calls>"},
    "Hunyuan": _LISTED
    | {
        "format": "hunyuan",
        "model_type": "hunyuan_v1_moe",
        "chat_template": "<|extra_0|> <tool_calls> <think><answer>",
        "turn": "<|extra_0|>",
        "reasoning": ("<think>\n", "\n</think>\n"),
        "answer": "<answer>\n",
        "answered": "\n</answer>\n",
    },
    "Apriel 1.6": _LISTED
    | {
        "format": "apriel",
        "model_type": "pixtral",
        "chat_template": "<|begin_assistant|> [BEGIN FINAL RESPONSE] <tool_calls>",
        "turn": "<|begin_assistant|>\n",
        "reasoning": ("Here are my reasoning steps:\n", "\n[BEGIN FINAL RESPONSE]\n"),
    },
    "Nemotron Nano 2": _LISTED
    | {
        "format": "nemotron",
        "model_type": "nemotron_h",
        "chat_template": "<SPECIAL_11>Assistant <TOOLCALL> <think>",
        "turn": "<SPECIAL_11>Assistant\n",
        "open": "<TOOLCALL>[",
        "close": "]</TOOLCALL>",
        "reasoning": _THINK,
    },
    "Granite 3.3": _LISTED
    | {
        "format": "granite",
        "model_type": "granite",
        "chat_template": "<|start_of_role|> <|tool_call|> <think> <response>",
        "turn": "<|start_of_role|>assistant<|end_of_role|>",
        "open": "<|tool_call|>[",
        "close": "]",
        "reasoning": ("<think>", "</think>"),
    },
    "Granite 3.2": _LISTED
    | {
        "format": "granite",
        "model_type": "granite",
        "chat_template": "<|start_of_role|> <|tool_call|> <think>",
        "turn": "<|start_of_role|>assistant<|end_of_role|>",
        "open": "<tool_call>[",
        "close": "]",
        "reasoning": ("Here is my thought process:\n\n", "\n\nHere is my response:\n\n"),
    },
    "Phi-4-mini": _LISTED
    | {
        "format": "phi",
        "model_type": "phi3",
        "chat_template": "<|assistant|> <|tool_call|> <|/tool_call|>",
        "turn": "<|assistant|>",
        "open": "<|tool_call|>[",
        "close": "]<|/tool_call|>",
    },
    "Firefunction": _LISTED
    | {
        "format": "functools",
        "model_type": "llama",
        "chat_template": "<|start_header_id|> functools[",
        "turn": _LLAMA,
        "open": " functools[",
        "close": "]",
    },
    "xLAM": _LISTED
    | {
        "format": "xlam",
        "model_type": "llama",
        "chat_template": "<|start_header_id|>",
        "turn": _LLAMA,
        "open": "[",
        "close": "]",
    },
    "Command A": _COMMAND,
    "Command A, the next": _COMMAND
    | {
        "format": "command-text",
        "model_type": "cohere2_moe",
        "chat_template": "<|START_ACTION|> <|START_THINKING|> <|START_TEXT|>",
        "answer": "<|START_TEXT|>",
        "answered": "<|END_TEXT|>",
    },
    "MiniMax-M3": {
        "format": "minimax-m3",
        "model_type": "minimax_m3",
        "chat_template": f"]~b]ai {MARK_OF_M3}<tool_call> <mm:think>",
        "turn": "]~b]ai\n",
        "open": f"{MARK_OF_M3}<tool_call>\n",
        "call": f'{MARK_OF_M3}<invoke name="{{name}}">{{arguments}}{MARK_OF_M3}</invoke>\n',
        "close": f"{MARK_OF_M3}</tool_call>",
        "reasoning": ("<mm:think>", "</mm:think>"),
        "argument": "elements",
        "is_json": False,
    },
    "Apertus": {
        "format": "apertus",
        "model_type": "apertus",
        "chat_template": "<|assistant_start|> <|tools_prefix|> <|inner_prefix|>",
        "turn": "<|assistant_start|>",
        "open": "<|tools_prefix|>[",
        "call": '{"{name}": {arguments}}',
        "between": ", ",
        "close": "]<|tools_suffix|>",
        "reasoning": ("<|inner_prefix|>", "<|inner_suffix|>"),
    },
    "Ernie 4.5": {
        "format": "ernie",
        "model_type": "ernie4_5_moe",
        "chat_template": "<|im_start|> <think> <response> <tool_call>",
        "turn": _CHATML,
        "call": "<tool_call>\n" + _CALL + "\n</tool_call>",
        "between": "\n",
        "reasoning": _THINK,
        "answer": "<response>\n",
        "answered": "\n</response>\n",
    },
    "InternLM": {
        "format": "internlm",
        "model_type": "internlm2",
        "chat_template": "<|im_start|> <|action_start|> <|plugin|>",
        "turn": _CHATML,
        "call": '<|action_start|><|plugin|>\n{"name": "{name}", "parameters": {arguments}}'
        "<|action_end|>",
        "between": "\n",
    },
    "GigaChat 3.1": _GIGACHAT,
    "GigaChat 3": _GIGACHAT
    | {
        "format": "gigachat",
        "chat_template": "assistant<|role_sep|> function call",
        "call": "<|message_sep|>\n\nfunction call<|role_sep|>\n" + _CALL,
        "between": "",
    },
    "Functionary 3.1": {
        "format": "functionary",
        "model_type": "llama",
        "chat_template": "<|start_header_id|> <function=example_function_name>",
        "turn": _LLAMA,
        "call": "<function={name}>{arguments}</function>",
    },
    "Functionary 3.2": {
        "format": "functionary-3.2",
        "model_type": "llama",
        "chat_template": "<|start_header_id|> >>>all",
        "turn": _LLAMA,
        "call": ">>>{name}\n{arguments}",
        "answer": ">>>all\n",
        "answered": "",
    },
    "LFM2": _PYTHON
    | {
        "format": "lfm2",
        "model_type": "lfm2",
        "chat_template": "<|im_start|> List of tools: <|tool_list_start|> <think>",
        "turn": _CHATML,
        "open": "<|tool_call_start|>[",
        "between": ", ",
        "close": "]<|tool_call_end|>",
        "reasoning": ("<think>", "</think>"),
    },
    "Llama 4 with JSON": {
        "format": "llama",
        "model_type": "llama4",
        "chat_template": "<|header_start|>",
        "turn": "<|header_start|>assistant<|header_end|>\n\n",
        "call": '{"name": "{name}", "parameters": {arguments}}',
    },
    "Llama 4": _PYTHON
    | {
        "format": "pythonic",
        "model_type": "llama4",
        "chat_template": "<|header_start|>",
        "turn": "<|header_start|>assistant<|header_end|>\n\n",
        "open": "[",
        "between": ", ",
        "close": "]",
    },
    "Llama 4 with python_start": _PYTHON
    | {
        "format": "pythonic",
        "model_type": "llama4",
        "chat_template": "<|header_start|>",
        "turn": "<|header_start|>assistant<|header_end|>\n\n",
        "open": "<|python_start|>[",
        "between": ", ",
        "close": "]<|python_end|>",
    },
    "Olmo 3": _PYTHON
    | {
        "format": "olmo",
        "model_type": "olmo3",
        "chat_template": "<|im_start|> <function_calls> <think>",
        "turn": _CHATML,
        "open": "<function_calls>\n",
        "between": "\n",
        "close": "\n</function_calls>",
        "reasoning": _THINK,
    },
}
